"use strict";
// Values of the reply as text. A value that is missing, or of another kind than it should be, is a dash.

const DASH = "–";
const MOST_CHARACTERS = 200;

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (value) => (Array.isArray(value) ? value : []);
const recordsOf = (value) => listOf(value).filter(isRecord);
const recordOf = (value) => (isRecord(value) ? value : {});

function textOf(value) {
  if (typeof value !== "string" || value === "") {
    return DASH;
  }
  if (value.length <= MOST_CHARACTERS) {
    return value;
  }
  return `${value.slice(0, MOST_CHARACTERS)}… (${countOf(value.length)} characters)`;
}

function countOf(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

// The length of a list; a dash where there is none.
function lengthOf(value) {
  return Array.isArray(value) ? countOf(value.length) : DASH;
}

function rateOf(value) {
  if (!isNumber(value)) {
    return DASH;
  }
  return value !== 0 && Math.abs(value) < 10 ? `${value.toPrecision(2)}/s` : `${countOf(value)}/s`;
}

function numberOf(value) {
  return isNumber(value) ? String(Number(value.toPrecision(4))) : DASH;
}

function bytesOf(value) {
  if (!isNumber(value)) {
    return DASH;
  }
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${countOf(size)} B` : `${size.toFixed(1)} ${units[unit]}`;
}

function bytesRateOf(value) {
  return isNumber(value) ? `${bytesOf(value)}/s` : DASH;
}

// A short time, such as that of a request: "beyond" is longer than the last bucket of its histogram.
function timeOf(value) {
  if (value === "beyond") {
    return "> 10 s";
  }
  if (!isNumber(value)) {
    return DASH;
  }
  for (const [unit, length] of [["s", 1], ["ms", 1e-3]]) {
    if (value >= length) {
      return `${Number((value / length).toPrecision(3))} ${unit}`;
    }
  }
  return `${Number((value * 1e6).toPrecision(3))} µs`;
}

// A long time, such as an age.
function ageOf(value) {
  if (!isNumber(value)) {
    return DASH;
  }
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= 2 * length) {
      return `${Math.round(value / length)} ${unit}`;
    }
  }
  return `${Math.round(value)} s`;
}

function stepsOf(value) {
  return value === "beyond" ? "beyond" : countOf(value);
}

// A moment that the coordinator has noted, in UTC; the clock of this browser is not asked.
function momentOf(value) {
  if (!isNumber(value) || Math.abs(value) > 8e12) {
    return DASH;
  }
  return `${new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

function shareOf(part, whole) {
  return isNumber(part) && isNumber(whole) && whole > 0 ? `${((100 * part) / whole).toFixed(0)} %` : "";
}

function ofBudget(used, budget) {
  const share = shareOf(used, budget);
  return share ? `${bytesOf(used)} of ${bytesOf(budget)} (${share})` : bytesOf(used);
}

function sumOf(records, name) {
  const known = records.map((record) => record[name]).filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}
