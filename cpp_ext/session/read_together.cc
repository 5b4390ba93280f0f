#include "session/read_together.h"

#include <algorithm>
#include <deque>

#include "session/session_state.h"

namespace sparserow {
namespace {

// One table of a round trip.
struct TableRead {
  Binding* binding = nullptr;
  TableStep rows;
  std::vector<IdsRef> ids;
};

}  // namespace

Result<std::vector<Lookup>> read_together(std::span<const BoundIds> wanted) {
  std::deque<TableRead> tables;
  std::vector<TableRead*> table_of;
  std::vector<SessionState*> sessions;
  for (const BoundIds& one : wanted) {
    Binding& binding = *one.binding;
    SessionState* session = binding.state_.get();
    if (std::find(sessions.begin(), sessions.end(), session) == sessions.end()) {
      SR_RETURN_IF_ERROR(session->check_usable());
      sessions.push_back(session);
    }
    SR_RETURN_IF_ERROR(binding.check_ids(one.ids.ids));
    auto table = std::find_if(tables.begin(), tables.end(), [&](const TableRead& t) { return t.binding == &binding; });
    if (table == tables.end()) {
      const BindingSpec& spec = binding.spec_;
      tables.push_back(
          {&binding, TableStep(spec.name, spec.table_id, spec.schema_version, spec.dim, session->shards()), {}});
      table = std::prev(tables.end());
    }
    table->ids.push_back(one.ids);
    table_of.push_back(&*table);
  }
  for (SessionState* session : sessions) {
    std::vector<TablePull> pulls;
    for (TableRead& table : tables) {
      if (table.binding->state_.get() != session) continue;
      const auto locked = session->partitioner();
      table.rows.add(table.ids, locked.partitioner);
      table.rows.pending(pulls);
    }
    if (pulls.empty()) continue;
    SR_RETURN_IF_ERROR(session->pull_step(pulls, session->pull_options(/*train=*/false), /*before_asking=*/true));
    if (pulls.size() > 1) ++session->counters.pulls_merged;
  }
  for (TableRead& table : tables) table.rows.confirm();
  std::vector<Lookup> out;
  for (std::size_t i = 0; i < wanted.size(); ++i) out.push_back(*table_of[i]->rows.recall(wanted[i].ids));
  return out;
}

}  // namespace sparserow
