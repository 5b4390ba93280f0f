// Sums of all rows of a step, which a pack gives and a commit reads from where they lie.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "session/lookup_pack.h"
#include "session/session.h"
#include "session_fixture.h"

using namespace sparserow;

// A pack of lookups of one table, and sums for its rows: (i + 1) in each column of the row at i.
struct PackedSums {
  std::unique_ptr<LookupPack> pack;
  std::vector<float> sums;

  PackedSums(const std::shared_ptr<Binding>& binding, const std::vector<std::int64_t>& ids) {
    const BoundIds wanted{binding, ref(ids)};
    pack = LookupPack::look_up({&wanted, 1}, true).value();
    for (std::size_t i = 0; i < pack->floats_of_sums(); ++i) sums.push_back(static_cast<float>(i / kDim + 1));
  }

  [[nodiscard]] Status stage(std::int64_t padding = -1) {
    const LookupPack::StagedPart part{0, padding};
    return pack->stage({&part, 1}, sums);
  }

  [[nodiscard]] float sum_of(std::int64_t id) const { return static_cast<float>(pack->position_of(0, id) + 1); }
};

TEST_CASE("sums of all rows of a step are committed from where they lie") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{1, 60, 2};
  PackedSums all(binding, ids);
  REQUIRE(all.stage().is_ok());
  // What lies there when the step is sealed counts, as nothing was copied; and a scale is applied to it there.
  for (float& each : all.sums) each += 1.0f;
  const std::vector<float> given = all.sums;
  REQUIRE(f.session->seal(0.5f).value().rows == 3);
  for (std::size_t i = 0; i < given.size(); ++i) CHECK(all.sums[i] == 0.5f * given[i]);
  REQUIRE(f.session->commit().is_ok());
  all.sums.assign(all.sums.size(), 7.0f);  // of no step any more
  for (const std::int64_t id : ids) CHECK(first_weight(*binding, id) == 1.0f - 0.25f * (all.sum_of(id) + 1.0f));
}

TEST_CASE("sums that others follow, or that leave a row out, are copied") {
  for (const bool leaves_out : {false, true}) {
    Fixture f;
    const auto binding = f.binding();
    const std::vector<std::int64_t> ids{1, 60, 2};
    PackedSums all(binding, ids);
    REQUIRE(all.stage(leaves_out ? 2 : -1).is_ok());
    if (!leaves_out) stage_ones(*binding, {60, 1});
    all.sums.assign(all.sums.size(), 100.0f);
    REQUIRE(f.session->seal(1.0f).value().rows == (leaves_out ? 2 : 3));
    REQUIRE(f.session->commit().is_ok());
    const float more = leaves_out ? 0.0f : 1.0f;
    CHECK(first_weight(*binding, 1) == 1.0f - 0.5f * (all.sum_of(1) + more));
    CHECK(first_weight(*binding, 60) == 1.0f - 0.5f * (all.sum_of(60) + more));
    CHECK(first_weight(*binding, 2) == 1.0f - 0.5f * (leaves_out ? 0.0f : all.sum_of(2)));
  }
}

TEST_CASE("rows that are looked up after the sums of all are committed without a gradient") {
  Fixture f;
  const auto binding = f.binding();
  PackedSums all(binding, {1, 60});
  REQUIRE(all.stage().is_ok());
  const std::vector<std::int64_t> later{2, 70};
  REQUIRE(binding->lookup(ref(later), true).is_ok());
  REQUIRE(f.session->seal(1.0f).value().rows == 2);
  REQUIRE(f.session->commit().is_ok());
  CHECK(first_weight(*binding, 60) == 1.0f - 0.5f * all.sum_of(60));
  CHECK(first_weight(*binding, 70) == 1.0f);
}

TEST_CASE("sums of all rows that are dropped, clipped or not finite are treated as any") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{1, 60};
  PackedSums all(binding, ids);
  REQUIRE(all.stage().is_ok());
  REQUIRE(f.session->drop_gradients().is_ok());
  CHECK(f.session->seal(1.0f).value().rows == 0);
  REQUIRE(f.session->abort().is_ok());

  PackedSums bad(binding, ids);
  bad.sums.back() = std::numeric_limits<float>::quiet_NaN();
  REQUIRE(bad.stage().is_ok());
  const SealReport report = f.session->seal(1.0f).value();
  CHECK(report.nonfinite_rows == 1);
  CHECK(bad.pack->position_of(0, static_cast<std::int64_t>(report.nonfinite_key)) == 1);
  REQUIRE(f.session->abort().is_ok());

  PackedSums clipped(binding, ids);
  REQUIRE(clipped.stage().is_ok());
  CHECK(f.session->seal(1.0f, 1.0f).value().rows == 2);
  REQUIRE(f.session->commit().is_ok());
  CHECK(first_weight(*binding, 60) == doctest::Approx(1.0f - 0.5f / std::sqrt(static_cast<float>(kDim))));
}
