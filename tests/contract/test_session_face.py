"""What users find on a session: a name that is added here is a promise."""

from __future__ import annotations

import sparserow as sr

FACE = {
    *("namespace", "rank", "world_size", "current_step", "optimizer"),
    *("create_table", "table", "drop_table"),
    *("distribute", "lift_embeddings", "dense_on_servers", "gather_tables", "prefetch"),
    *("save", "restore", "keep_rows", "publish", "import_weights", "record_otel"),
    *("step", "wrap", "flush", "discard", "stats", "close"),
    *("join_hook", "join_device", "join_process_group"),  # of torch's Join
}


def test_the_class_has_what_users_call_and_no_more() -> None:
    assert {name for name in dir(sr.Session) if not name.startswith("_")} == FACE
    assert all(getattr(sr.Session, name).__doc__ for name in FACE)


def test_a_session_adds_its_core_alone() -> None:
    with sr.InProcessCluster().connect("face") as session:
        assert {name for name in vars(session) if not name.startswith("_")} == {"core"}


def test_each_counter_has_a_sentence_with_its_unit() -> None:
    sentences = sr.SessionStats.describe()
    with sr.InProcessCluster().connect("face") as session:
        assert set(session.core.native.stats()) | sr.SessionStats.of_python() == set(sentences)
    assert all(text.endswith(("(count).", "(bytes).")) for text in sentences.values())
