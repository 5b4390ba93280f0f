// WriteHandler without a socket: what a shard answers to writes, and what it changes.
#include "rpc/server/write_handler.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;

namespace {

constexpr std::uint32_t kDim = 2;

// One shard of two, whose requests are made here.
struct Shard {
  TableSchema table = sgd_table("ads/user", kDim, 0.0f);
  std::shared_ptr<Store> store = make_store();
  ServerCore core{ServerOptions{}, store};
  Grant grant{.digest = {}, .role = Role::kAdmin, .namespaces = {"ads"}};
  std::uint64_t mine = 0;
  std::uint64_t others = 0;

  Shard() {
    REQUIRE(store->create_table(table).is_ok());
    core.set_route(1, round_robin(2));
    const auto owner = [this](std::uint64_t key) { return slot_of(row_hash(table.id, key), kSlots) % 2; };
    while (owner(mine) != 0) ++mine;
    while (owner(others) != 1) ++others;
    REQUIRE(
        core.commits
            .set_job({.job_id = 1, .name = "job", .staleness = std::nullopt, .members = {{0, 1, 0}}, .first_step = 0})
            .is_ok());
  }

  struct Call {
    FrameType type = FrameType::kCommit;
    std::uint64_t sequence = 1;
    std::int64_t step = 0;
    std::uint8_t flags = 0;
    std::vector<std::uint64_t> keys = {};
    float value = 0;
    float lr = 1;
    std::uint32_t schema_version = 1;
  };

  Outcome serve(const Call& asked) {
    Request request{.core = core, .grant = grant, .header = {}, .body = {}, .deadline = {}, .arrival = {}};
    FrameHeader& header = request.header;
    header.type = static_cast<std::uint16_t>(asked.type);
    header.flags = asked.flags;
    header.job_id = 1;
    header.worker_epoch = 1;
    header.route_epoch = 1;
    header.sequence = asked.sequence;
    header.step = asked.step;
    std::vector<std::byte> frame;
    if (!asked.keys.empty()) {
      TableDescriptor descriptor;
      descriptor.table_id = table.id;
      descriptor.schema_version = asked.schema_version;
      descriptor.dim = kDim;
      descriptor.n = static_cast<std::uint32_t>(asked.keys.size());
      descriptor.lr = asked.lr;
      const std::vector<float> rows(asked.keys.size() * kDim, asked.value);
      std::vector<std::byte> payload(sizeof descriptor + asked.keys.size() * 8);
      std::memcpy(payload.data(), &descriptor, sizeof descriptor);
      std::memcpy(payload.data() + sizeof descriptor, asked.keys.data(), asked.keys.size() * 8);
      const bool has_rows = asked.type != FrameType::kDelete;
      const auto kind = has_rows ? SectionKind::kTableGrads : SectionKind::kTableKeys;
      frame = small_frame(header, kind, payload, has_rows ? std::as_bytes(std::span(rows)) : std::span<std::byte>{});
      std::memcpy(&header, frame.data(), sizeof header);
      body_.assign(frame.begin() + sizeof header, frame.end());
    } else {
      body_.clear();
    }
    request.body.bytes = body_;
    return WriteHandler(request).serve();
  }
  // The first value of a row of this shard.
  float row(std::uint64_t key) {
    std::vector<float> rows(kDim);
    REQUIRE(store->pull(table.id, std::span(&key, 1), Dtype::kFloat32, std::as_writable_bytes(std::span(rows)).data())
                .is_ok());
    return rows[0];
  }
  static AckPayload ack(const Outcome& outcome) {
    REQUIRE(outcome.is_ok());
    FrameHeader header;
    REQUIRE(outcome.frame.size() > sizeof header);
    std::memcpy(&header, outcome.frame.data(), sizeof header);
    SectionReader sections(std::span(outcome.frame).subspan(sizeof header), header.section_count);
    const auto section = sections.next();
    REQUIRE((section.is_ok() && section.value() && section.value()->kind == SectionKind::kAck));
    return take(parse_ack(section.value()->payload));
  }

 private:
  std::vector<std::byte> body_;
};

}  // namespace

TEST_CASE("a commit is applied once, and answered again from the window") {
  Shard shard;
  const Shard::Call commit{.keys = {shard.mine}, .value = -1.0f};
  CHECK(Shard::ack(shard.serve(commit)).duplicate == 0);
  CHECK(Shard::ack(shard.serve(commit)).duplicate == 1);
  CHECK(shard.row(shard.mine) == 1.0f);
}

TEST_CASE("what is prepared is applied by its COMMIT alone, and an ABORT drops it") {
  Shard shard;
  const Shard::Call prepare{.type = FrameType::kPrepare, .keys = {shard.mine}, .value = -1.0f};
  Shard::ack(shard.serve(prepare));
  CHECK(shard.row(shard.mine) == 0.0f);
  CHECK(Shard::ack(shard.serve({.flags = kFramePrepared})).count == 1);
  CHECK(shard.row(shard.mine) == 1.0f);
  Shard::Call second = prepare;
  second.sequence = 2;
  second.step = 1;
  Shard::ack(shard.serve(second));
  Shard::ack(shard.serve({.type = FrameType::kAbort, .sequence = 2, .step = 1}));
  CHECK_FALSE(shard.serve({.sequence = 2, .step = 1, .flags = kFramePrepared}).is_ok());
  CHECK(shard.row(shard.mine) == 1.0f);
}

TEST_CASE("a write that is refused changes nothing, and its connection goes on") {
  Shard shard;
  const auto code_of = [&shard](const Shard::Call& asked) {
    const Outcome outcome = shard.serve(asked);
    CHECK_FALSE(outcome.is_grammar_broken);
    CHECK(shard.row(shard.mine) == 0.0f);
    return outcome.status.code();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::uint64_t> both{shard.mine, shard.others};
  for (const FrameType type : {FrameType::kCommit, FrameType::kPrepare, FrameType::kAssign}) {
    CHECK(code_of({.type = type, .keys = both, .value = 1.0f}) == Code::kStaleRoute);
    CHECK(code_of({.type = type, .keys = {shard.mine}, .value = 1.0f, .schema_version = 2}) != Code::kOk);
  }
  CHECK(code_of({.type = FrameType::kDelete, .keys = both}) == Code::kStaleRoute);
  CHECK(code_of({.keys = {shard.mine}, .value = 1.0f, .lr = nan}) == Code::kInvalidArgument);
  CHECK(code_of({.step = kNoStep, .keys = {shard.mine}, .value = nan}) == Code::kInvalidArgument);
  CHECK(code_of({.type = FrameType::kAssign, .keys = {shard.mine}, .value = nan}) == Code::kInvalidArgument);
  shard.grant.namespaces = {"other"};
  for (const FrameType type : {FrameType::kCommit, FrameType::kPrepare, FrameType::kAssign, FrameType::kDelete}) {
    CHECK(code_of({.type = type, .keys = {shard.mine}, .value = 1.0f}) != Code::kOk);
  }
}

TEST_CASE("a frame that contradicts itself ends its connection") {
  Shard shard;
  CHECK(shard.serve({.flags = kFramePrepared, .keys = {shard.mine}}).is_grammar_broken);
  CHECK(shard.serve({.type = FrameType::kPrepare, .flags = kFramePrepared}).is_grammar_broken);
  CHECK(shard.serve({.type = FrameType::kAbort, .keys = {shard.mine}}).is_grammar_broken);
}

TEST_CASE("rows are assigned and erased once for a sequence, and each time without one") {
  Shard shard;
  Shard::Call assign{.type = FrameType::kAssign, .sequence = 5, .step = kNoStep, .keys = {shard.mine}, .value = 3.0f};
  CHECK(Shard::ack(shard.serve(assign)).duplicate == 0);
  CHECK(shard.row(shard.mine) == 3.0f);
  assign.value = 4.0f;
  CHECK(Shard::ack(shard.serve(assign)).duplicate == 1);
  CHECK(shard.row(shard.mine) == 3.0f);
  assign.sequence = 0;
  CHECK(Shard::ack(shard.serve(assign)).duplicate == 0);
  CHECK(shard.row(shard.mine) == 4.0f);
  const Shard::Call erase{.type = FrameType::kDelete, .sequence = 6, .step = kNoStep, .keys = {shard.mine}};
  CHECK(Shard::ack(shard.serve(erase)).count == 1);
  CHECK(Shard::ack(shard.serve(erase)).duplicate == 1);
  CHECK(shard.row(shard.mine) == 0.0f);
}
