// The five screens: each makes blocks of a reply. What is wrong stands above all of them, in the sentences of the status.

const MOST_CHARTS = 12;
const ASK_THEM = "They are asked by: sparserow status --serving HOST:PORT,…";

const SCREENS = {
  cluster: clusterScreen,
  tables: tablesScreen,
  jobs: jobsScreen,
  serving: servingScreen,
  checkpoints: checkpointsScreen,
};

function seriesOf(reply, name) {
  return listOf(recordOf(recordOf(reply.series).cluster)[name]);
}

function clusterChart(reply, name, title, format) {
  return chart(`chart-${name}`, title, seriesOf(reply, name), recordOf(reply.series).every_sec, format);
}

function timesOf(shard, kind) {
  return recordsOf(shard.times).find((times) => times.kind === kind) || {};
}

function stateOf(status) {
  return status.ready === true ? "ready" : status.ready === false ? "not ready" : DASH;
}

function lostOf(shard) {
  const workers = shard.losses_unknown;
  const unknown = isNumber(workers) && workers > 0 ? ` and unknown of ${countOf(workers)} workers` : "";
  return { text: `${countOf(shard.commits_lost)}${unknown}`, bad: shard.commits_lost > 0 || unknown !== "" };
}

function clusterScreen(reply) {
  const { status } = reply;
  const shards = recordsOf(status.shards);
  const serving = shards.filter((shard) => shard.state === "serving").length;
  const budget = sumOf(shards, "budget_bytes");
  const skew = Object.entries(recordOf(status.skew)).filter(([, value]) => isNumber(value));
  return [
    heading("title", "Cluster"),
    facts("facts", "The whole cluster", [
      ["state", stateOf(status)],
      ["shards that serve", `${countOf(serving)} of ${lengthOf(status.shards)}`],
      ["rows", countOf(sumOf(shards, "rows"))],
      ["memory", ofBudget(sumOf(shards, "memory_bytes"), budget)],
      ["SSD", bytesOf(sumOf(shards, "ssd_bytes"))],
      ["rows pulled", rateOf(sumOf(shards, "rows_pulled_per_sec"))],
      ["rows pushed", rateOf(sumOf(shards, "rows_applied_per_sec"))],
      ["requests", rateOf(sumOf(shards, "requests_per_sec"))],
      ["network", bytesRateOf(sumOf(shards, "bytes_per_sec"))],
      ["newest checkpoint", isNumber(status.checkpoint_age_sec) ? `${ageOf(status.checkpoint_age_sec)} old` : DASH],
      ["slots, route epoch", `${countOf(status.slots)}, ${countOf(status.route_epoch)}`],
      ["workers that are leaving", countOf(status.leaving)],
      ["largest shard over the mean", skew.map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ") || DASH, "wide"],
    ]),
    charts("charts", [
      clusterChart(reply, "rows_pulled_per_sec", "Rows pulled a second", rateOf),
      clusterChart(reply, "rows_applied_per_sec", "Rows pushed a second", rateOf),
      clusterChart(reply, "requests_per_sec", "Requests a second", rateOf),
      clusterChart(reply, "pull_p99_sec", "p99 of pulls, of the slowest shard", timeOf),
      clusterChart(reply, "commit_p99_sec", "p99 of commits, of the slowest shard", timeOf),
      clusterChart(reply, "memory_bytes", "Memory of rows and indexes", bytesOf),
    ]),
    shardTable(reply, shards),
  ];
}

// Shards that do not serve, or have a problem, stand first.
function shardTable(reply, shards) {
  const pulls = listOf(recordOf(recordOf(reply.series).shards).rows_pulled_per_sec);
  const isWell = (shard) => shard.state === "serving" && !shard.problem;
  const columns = [
    ["shard", "number"], ["state", ""], ["process", "name"], ["rows", "number"], ["memory", "number"], ["SSD", "number"],
    ["pulled", "number"], ["pushed", "number"], ["requests", "number"], ["waiting", "number"], ["p99 pull", "number"], ["p99 commit", "number"],
    ["clients", "number"], ["lost commits", "number"], ["restores", "number"], ["problem", "prose"],
  ];
  const rows = [...shards].sort((a, b) => isWell(a) - isWell(b)).map((shard) => [
    countOf(shard.shard),
    { text: textOf(shard.state), bad: !isWell(shard) },
    shard.pid ? `${textOf(shard.address)} (process ${shard.pid})` : textOf(shard.address),
    countOf(shard.rows),
    ofBudget(shard.memory_bytes, shard.budget_bytes),
    bytesOf(shard.ssd_bytes),
    { text: rateOf(shard.rows_pulled_per_sec), points: listOf(pulls[shard.shard]) },
    rateOf(shard.rows_applied_per_sec),
    rateOf(shard.requests_per_sec),
    countOf(shard.pulls_waiting),
    timeOf(timesOf(shard, "pull").p99_sec),
    timeOf(timesOf(shard, "commit").p99_sec),
    countOf(shard.connections),
    lostOf(shard),
    countOf(shard.restores),
    shard.problem ? { text: textOf(shard.problem), bad: true } : "",
  ]);
  return table("shards", "Shards", columns, rows, reply.status.shards);
}

// The ages of a table's rows since their last push; a sweep sees them, so that only a table with a policy has any.
function rowAges(each) {
  const steps = recordOf(each.ages_steps);
  const seconds = recordOf(each.ages_seconds);
  const found = [];
  if (isNumber(steps.p50)) {
    found.push(`${countOf(steps.p50)} / ${countOf(steps.p99)} steps`);
  }
  if (isNumber(seconds.p50)) {
    found.push(`${ageOf(seconds.p50)} / ${ageOf(seconds.p99)}`);
  }
  return found.join(", ") || DASH;
}

function tablesScreen(reply) {
  const { status } = reply;
  const tables = recordsOf(status.tables);
  const columns = [
    ["table", "name"], ["rows", "number"], ["memory", "number"], ["rows on SSD", "number"], ["SSD", "number"],
    ["added", "number"], ["refused", "number"], ["evicted", "number"], ["swept", "number"], ["age p50 / p99", "number"],
    ["largest / mean", "number"], ["stale p50 / p99", "number"], ["rows of", "short"],
  ];
  const largest = (each) => (isNumber(each.rows_skew) ? `shard ${countOf(each.largest_shard)}: ${each.rows_skew.toFixed(2)}` : DASH);
  const rows = tables.map((each) => [
    textOf(each.table), countOf(each.rows), bytesOf(each.memory_bytes), countOf(each.ssd_rows), bytesOf(each.ssd_bytes),
    countOf(each.added), countOf(each.refused), countOf(each.evicted), countOf(each.swept), rowAges(each), largest(each),
    each.staleness_p50 === null ? DASH : `${stepsOf(each.staleness_p50)} / ${stepsOf(each.staleness_p99)}`,
    `${countOf(each.dim)} × ${textOf(each.dtype)}, ${textOf(each.optimizer)}`,
  ]);
  return [
    heading("title", "Tables"),
    facts("facts", "All tables", [
      ["tables", lengthOf(status.tables)],
      ["rows", countOf(sumOf(tables, "rows"))],
      ["memory", bytesOf(sumOf(tables, "memory_bytes"))],
      ["rows on SSDs alone", countOf(sumOf(tables, "ssd_rows"))],
      ["bytes on SSDs", bytesOf(sumOf(tables, "ssd_bytes"))],
      ["rows added since the start", countOf(sumOf(tables, "added"))],
      ["pushes of rows refused", countOf(sumOf(tables, "refused"))],
      ["rows swept by policies", countOf(sumOf(tables, "swept"))],
      ["rows evicted to SSDs", countOf(sumOf(tables, "evicted"))],
    ]),
    charts("charts", [
      clusterChart(reply, "rows", "Rows", countOf),
      clusterChart(reply, "ssd_rows", "Rows on SSDs alone", countOf),
    ]),
    table("tables-table", "Tables", columns, rows, status.tables),
  ];
}

function jobsScreen(reply) {
  const { status } = reply;
  const jobs = recordsOf(status.jobs);
  return [
    heading("title", "Jobs"),
    table("jobs-table", "Jobs", [
      ["job", "name"], ["state", "short"], ["staleness", ""], ["committed step", "number"], ["steps", "number"],
      ["samples", "number"], ["loss", "number"], ["AUC", "number"], ["last test", "short"], ["lowest step", "number"],
    ], jobs.map(jobRow), status.jobs),
    charts("charts", [...jobCharts(reply, jobs), ...stalenessBars(status)]),
    workerTable(status.jobs),
    streamTable(status.streams),
    faultTable(status.faults),
  ];
}

function jobRow(job) {
  const members = listOf(job.members).length;
  const barrier = job.staleness === null ? "no barrier" : countOf(job.staleness);
  return [
    textOf(job.job),
    `${job.complete ? "all" : `${countOf(members)} of`} ${countOf(job.world_size)} ranks have come`,
    job.quorum ? `${barrier}, quorum ${countOf(job.quorum)}` : barrier,
    countOf(job.highest_step),
    rateOf(job.steps_per_sec),
    rateOf(job.samples_per_sec),
    numberOf(job.loss),
    numberOf(job.auc),
    job.test_metric ? `${textOf(job.test_metric)} ${numberOf(job.test_value)}` : DASH,
    countOf(job.step),
  ];
}

function jobCharts(reply, jobs) {
  const series = recordOf(recordOf(reply.series).jobs);
  const every = recordOf(reply.series).every_sec;
  return jobs.slice(0, MOST_CHARTS).flatMap((job, index) => {
    const own = recordOf(Object.prototype.hasOwnProperty.call(series, job.job) ? series[job.job] : null);
    const found = [
      chart(`steps-${index}`, `${textOf(job.job)}: step`, listOf(own.highest_step), every, countOf),
      chart(`rate-${index}`, `${textOf(job.job)}: steps a second`, listOf(own.steps_per_sec), every, rateOf),
    ];
    if (listOf(own.samples_per_sec).some(isNumber)) {
      found.push(chart(`samples-${index}`, `${textOf(job.job)}: samples a second`, own.samples_per_sec, every, rateOf));
      found.push(chart(`loss-${index}`, `${textOf(job.job)}: mean loss`, listOf(own.loss), every, numberOf));
    }
    for (const [name, words] of [["auc", "AUC of recent samples, before they are trained on"], ["test_value", `tests: ${textOf(job.test_metric)}`]]) {
      if (listOf(own[name]).some(isNumber)) {
        found.push(chart(`${name}-${index}`, `${textOf(job.job)}: ${words}`, own[name], every, numberOf));
      }
    }
    if (listOf(own.events_per_sec).some(isNumber)) {
      found.push(chart(`events-${index}`, `${textOf(job.job)}: events a second`, own.events_per_sec, every, rateOf));
    }
    return found;
  });
}

// A histogram for each namespace, of the pulls of its tables; buckets behind the last pull are left out.
function stalenessBars(status) {
  const pulls = new Map();
  for (const each of recordsOf(status.tables)) {
    const namespace = textOf(each.table).split("/")[0];
    const counts = pulls.get(namespace) || new Map();
    for (const { at_most: most, pulls: count } of recordsOf(each.staleness)) {
      counts.set(most, (counts.get(most) || 0) + (isNumber(count) ? count : 0));
    }
    if (counts.size) {
      pulls.set(namespace, counts);
    }
  }
  const label = (most) => (most === "beyond" ? "more steps" : most === 0 ? "0 steps" : `up to ${countOf(most)}`);
  return [...pulls].slice(0, MOST_CHARTS).map(([namespace, counts], index) => {
    const steps = (most) => (isNumber(most) ? most : Infinity);
    const buckets = [...counts].sort(([a], [b]) => steps(a) - steps(b)).map(([most, count]) => [label(most), count]);
    const last = buckets.findLastIndex(([, count]) => count > 0);
    return bars(`stale-${index}`, `${namespace}: steps by which pulls were stale`, buckets.slice(0, last + 1));
  });
}

function workerTable(jobs) {
  const columns = [
    ["job", "name"], ["rank", "number"], ["worker", "number"], ["epoch", "number"], ["step", "number"],
    ["lease left", "number"],
  ];
  const rows = recordsOf(jobs).flatMap((job) =>
    recordsOf(job.members).map((member) => [
      textOf(job.job), countOf(member.rank), countOf(member.worker_id), countOf(member.epoch), countOf(member.step),
      { text: isNumber(member.lease_left_sec) ? `${member.lease_left_sec.toFixed(1)} s` : DASH, bad: member.lease_left_sec === 0 },
    ]),
  );
  return table("workers", "Workers", columns, rows, jobs);
}

function streamTable(streams) {
  const columns = [
    ["job", "name"], ["source", "name"], ["parts", "number"], ["lag", "number"], ["events", "number"], ["events a second", "number"],
    ["dead", "number"], ["empty", "number"], ["lost", "number"], ["late", "number"], ["behind", "number"],
  ];
  const rows = recordsOf(streams).map((each) => [
    textOf(each.job), textOf(each.source), countOf(each.parts), countOf(each.lag), countOf(each.events), rateOf(each.events_per_sec),
    countOf(each.dead), countOf(each.empty), countOf(each.lost), countOf(each.late), ageOf(each.behind_sec),
  ]);
  return table("streams", "Streams", columns, rows, streams);
}

function faultTable(faults) {
  const columns = [["when", ""], ["job", "name"], ["rank", "number"], ["host", "name"], ["fault", "prose"], ["kind", ""]];
  const rows = recordsOf(faults).map((each) => [
    momentOf(each.time), textOf(each.job), countOf(each.rank), textOf(each.host), textOf(each.message), each.echo ? "likely an echo" : "",
  ]);
  return table("faults", "Faults of workers (tracebacks: sparserow status --faults)", columns, rows, faults);
}

function isBeyond(value, goal) {
  return isNumber(goal) && (value === "beyond" || (isNumber(value) && value > goal));
}

function servingScreen(reply) {
  const { status } = reply;
  const shards = recordsOf(status.shards);
  const rows = shards.map((shard) => {
    const lookups = timesOf(shard, "lookup");
    return [
      countOf(shard.shard), countOf(shard.followers), timeOf(shard.followers_behind_sec), rateOf(lookups.per_sec), timeOf(lookups.p50_sec), timeOf(lookups.p99_sec),
    ];
  });
  const most = shards.map((each) => each.followers).filter(isNumber).reduce((a, b) => Math.max(a, b), 0);
  const processes = recordsOf(status.serving).map((each) => [
    textOf(each.address), textOf(each.model), countOf(each.version), countOf(each.rows), timeOf(each.behind_sec),
    timeOf(each.fresh_p50_sec), timeOf(each.fresh_p99_sec), each.problem ? { text: textOf(each.problem), bad: true } : "",
  ]);
  const blocks = [
    heading("title", "Serving"),
    facts("facts", "Serving processes", [["followers of a shard, at most", countOf(most)]]),
    table("following", "Versions that follow", [
      ["process", "name"], ["model", "name"], ["aliases", "name"], ["shards", "number"], ["behind", "number"],
      ["fresh p50", "number"], ["fresh p99", "number"], ["goal of p99", "number"], ["last heard", "number"],
    ], recordsOf(status.followers).map((each) => [
      textOf(each.process), textOf(each.model), each.aliases === "" ? "none" : textOf(each.aliases), countOf(each.shards),
      timeOf(each.behind_sec), timeOf(each.fresh_p50_sec),
      { text: timeOf(each.fresh_p99_sec), bad: isBeyond(each.fresh_p99_sec, each.goal_sec) }, timeOf(each.goal_sec),
      timeOf(each.silent_sec),
    ]), status.followers),
    note("ask-them", `Versions that do not follow are known to the processes alone. ${ASK_THEM}`),
    charts("charts", [
      clusterChart(reply, "followers", "Serving processes that follow, summed over shards", countOf),
      clusterChart(reply, "lookup_p99_sec", "p99 of lookups, of the slowest shard", timeOf),
    ]),
    table("followers", "Followers by shard", [
      ["shard", "number"], ["followers", "number"], ["farthest behind", "number"], ["lookups", "number"], ["p50", "number"], ["p99", "number"],
    ], rows, status.shards),
  ];
  if (processes.length) {
    blocks.push(table("processes", "Processes", [
      ["process", "name"], ["model", "name"], ["version", "number"], ["rows", "number"], ["behind", "number"], ["fresh p50", "number"],
      ["fresh p99", "number"], ["problem", "prose"],
    ], processes, status.serving));
  }
  return blocks;
}

function checkpointsScreen(reply) {
  const { status } = reply;
  const damaged = listOf(status.damaged_checkpoints);
  const lost = sumOf(recordsOf(status.shards), "commits_lost");
  return [
    heading("title", "Checkpoints"),
    facts("facts", "The newest checkpoint", [
      ["newest that has these rows", status.checkpoint === "" ? "none" : textOf(status.checkpoint), "wide"],
      ["age", ageOf(status.checkpoint_age_sec)],
      ["its save took", timeOf(status.checkpoint_took_sec)],
      ["checkpoints that its rows lie in", countOf(status.checkpoint_links)],
      ["saves that failed since the start", countOf(status.saves_failed)],
      ["found damaged in its folder", lengthOf(status.damaged_checkpoints)],
      ["commits lost by shards that came back", countOf(lost)],
    ]),
    table("damaged", "Damaged checkpoints", [["name", "name"]], damaged.map((name) => [textOf(name)]), status.damaged_checkpoints),
    charts("charts", [clusterChart(reply, "commits_lost", "Commits lost by shards that came back", countOf)]),
  ];
}
