// The studio: runs of a results folder, their curves, trajectories, settings and logs. Text is only
// ever written as textContent.
"use strict";

const byId = id => document.getElementById(id);
const accessToken = new URLSearchParams(location.search).get("token") || "";
const STEPS_FOLDER = "train/trajectories/";
const FILTERS = ["text", "agent", "status", "low", "high"];
const TABS = ["curves", "trajectories", "waiting", "settings", "messages"];
const TAB_ADDRESSES = {settings: "config", messages: "log"};  // as their buttons are labelled
const COLOURS = 8;

// Charts that are always shown, in this order; "*" stands for an agent. Other metrics are folded.
const KEY_CHARTS = ["reward/mean", "outcome/mean", "validation/accuracy", "agent/*/reward_mean",
  "agent/*/valid_ratio", "agent/*/response_length", "agent/*/entropy", "agent/*/kl", "agent/*/grad_norm",
  "agent/*/gradient_share"];
// Those of them that are shown even if all values are zero.
const ZERO_CHARTS = KEY_CHARTS.slice(0, 5);
const ZERO = 1e-9;  // absolute values below it are rounding errors
// Ends of the interval that is drawn around the validation accuracy.
const BAND = {chart: "validation/accuracy", low: "validation/ci_low", high: "validation/ci_high"};
const SMOOTHING_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500];  // positions of the slider
const DASHES = [[], [5, 3]];  // of the chosen run and of the run that it is compared with

const TENTHS = new Intl.NumberFormat("en", {
  minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven", useGrouping: false,
});

// Units by name, with a `label` for the heading of a chart, `value` for texts of values in legends,
// `format` for the ticks of an axis, and the bounds that an axis does not leave.
const UNITS = {
  share: {label: "", bounds: [0, 1], value: y => `${+formatTenths(100 * y)}\u00a0%`, format: shareFormat},
  s: {label: "seconds", value: y => `${formatNumber(y)}\u00a0s`, format: numberFormat},
  tokens: {label: "tokens", value: formatNumber, format: numberFormat},
  "": {label: "", value: formatNumber, format: numberFormat},
};

// The chosen run, and the run that it is compared with (with name "" if there is none). `rows` has
// the metrics of each step by its number, so that a step that is read twice is there once. `charts`
// has title, unit and member of each metric by its name. metrics.jsonl has been read up to byte
// `end`, and `reading` is the promise of a read in progress.
const run = emptyRun("");
const other = emptyRun("");

let states = [];  // states of all runs
let files = [];  // files of trajectories of the chosen run
// Indices in the file at which the pages of the list begin, from the first page to the one that is shown.
let pageStarts = [0];
let followsNewest = true;  // show the file of the newest step when it appears
let listRequests = 0;  // number of requests for the list, to drop outdated answers
let tab = "curves";
let shownSettings = "";  // name of the run whose config is shown
const charts = new Map();  // line charts on the page, by name of the chart
let workChart = null;  // line chart of the tab "waiting"


// Helpers

function emptyRun(name) {
  return {name, rows: new Map(), charts: {}, end: 0, agents: [], reading: null};
}

async function fetchJson(path, query = {}) {
  const headers = accessToken ? {Authorization: "Bearer " + accessToken} : {};
  const response = await fetch(path + "?" + new URLSearchParams(query), {headers});
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function element(name, text, children = []) {
  const node = document.createElement(name);
  if (text !== null) node.textContent = text;
  node.append(...children);
  return node;
}

function withClass(node, name) {
  node.className = name;
  return node;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e5 || (value && size < 1e-3)) return value.toExponential(1).replaceAll("-", "\u2212");
  return minusSign(String(+value.toPrecision(size < 1 ? 3 : 4)));
}

function minusSign(text) {
  return text.replaceAll("-", "\u2212");
}

// Round ties to even as Python does, so that the tables and the studio show the same number.
function formatTenths(value) {
  return TENTHS.format(value);
}

function formatPercent(value) {
  return `${formatTenths(100 * value)}\u00a0%`;
}

function formatDifference(text) {
  return text.startsWith("\u2212") ? text : `+${text}`;
}

// Format of the ticks of an axis, in the language of d3-format.
function numberFormat([low, high]) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size >= 1e4) return "~s";
  return size < 1e-3 ? ".1~e" : ".4~g";
}

function shareFormat([low, high]) {
  const decimals = Math.max(0, Math.ceil(-1.5 - Math.log10(high - low)));
  return `.${decimals}~%`;
}

function last(list) {
  return list[list.length - 1];
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}


// List of runs

async function showRuns() {
  states = await fetchJson("/api/runs");
  byId("runs").replaceChildren(...states.map(runButton));
  showOtherRuns(states.map(state => state.run).filter(name => name !== run.name));
  if (!run.name && states.length) await chooseRun(initialRun());
  showTiles();
}

function runButton(state) {
  const progress = element("progress", null);
  progress.max = state.total_steps || 1;
  progress.value = state.total_steps ? state.steps : 0;
  const facts = [state.done ? plural(state.steps, "step") : `step ${state.steps} of ${state.total_steps ?? "?"}`];
  if (state.failure) facts.unshift("failed");
  if (state.reward !== null) facts.push(`reward ${formatNumber(state.reward)}`);
  for (const [evaluation, score] of Object.entries(state.scores)) {
    facts.push(`${evaluation} ${formatPercent(score)}`);
  }
  const failures = state.failure ? [state.failure] : [];
  const problems = [...failures, ...state.problems].map(problem => withClass(element("small", problem), "bad clamp"));
  for (const problem of problems) problem.title = problem.textContent;
  const parts = [element("small", facts.join(" · ")), ...problems, ...(state.done || state.failure ? [] : [progress])];
  const button = element("button", state.run, parts);
  button.setAttribute("aria-current", state.run === run.name);
  button.onclick = () => chooseRun(state.run);
  return button;
}

function showOtherRuns(names) {
  const select = byId("other");
  const values = ["", ...names];
  if (values.join() === [...select.options].map(option => option.value).join()) return;
  select.replaceChildren(...values.map(name => new Option(name || "no other run", name)));
  select.value = other.name;
}

// Return the run of the address, or else the one that changed last; set the tab to that of the address.
function initialRun() {
  const [runName, tabName] = location.hash.slice(1).split("/").map(decodeURIComponent);
  tab = TABS.find(name => [name, TAB_ADDRESSES[name]].includes(tabName)) || tab;
  if (states.some(state => state.run === runName)) return runName;
  return states.reduce((newest, state) => state.changed_s > newest.changed_s ? state : newest).run;
}

async function chooseRun(name) {
  Object.assign(run, emptyRun(name));
  if (other.name === name) byId("other").value = "";
  files = [];
  pageStarts = [0];
  followsNewest = true;
  listRequests += 1;  // drops a late answer about the run before
  removeCharts();
  removeTimeline();
  byId("run").hidden = false;
  byId("title").textContent = name;
  byId("conversation").removeAttribute("src");
  byId("list").replaceChildren();
  for (const button of byId("runs").children) {
    button.setAttribute("aria-current", button.firstChild.textContent === name);
  }
  chooseTab(tab);
  const agents = await fetchJson("/api/agents", {run: name}).catch(() => []);
  if (name !== run.name) return;  // another run was chosen meanwhile
  run.agents = agents;
  await compareRuns();
  await refresh(true);
}

function chooseTab(name) {
  tab = name;
  for (const candidate of TABS) {
    byId(candidate).hidden = candidate !== name;
    byId(`tab_${candidate}`).setAttribute("aria-selected", candidate === name);
  }
  const tabAddress = TAB_ADDRESSES[name] || name;
  const suffix = name === "curves" ? "" : `/${tabAddress}`;
  history.replaceState(null, "", `${location.search}#${encodeURIComponent(run.name)}${suffix}`);
  if (name === "settings") showSettings();
}

// Show what is new of the chosen run. Files of an evaluation come without new rows, so the list of
// files is also read if `readsFiles`.
async function refresh(readsFiles) {
  const name = run.name;
  const hasNewRows = (await Promise.all([readNewRows(run), readNewRows(other)])).some(Boolean);
  if (name !== run.name) return;  // another run was chosen meanwhile
  if (hasNewRows || !charts.size) drawCharts();
  showFacts();
  if (hasNewRows || readsFiles || !files.length) await showFiles();
  const log = await fetchJson("/api/log", {run: name});
  if (name !== run.name) return;
  const text = log || "The training has written no log yet.";
  if (text !== byId("log").textContent) {
    byId("log").textContent = text;
    byId("log").scrollTop = 1e9;
  }
}

// Read the rows that were appended to the metrics of a run; return true if there are any. A call
// during a read waits for that read, so that no row is read by two calls.
function readNewRows(target) {
  if (!target.name) return false;
  if (target.reading === null) {
    const reading = readRows(target).finally(() => {
      if (target.reading === reading) target.reading = null;
    });
    target.reading = reading;
  }
  return target.reading;
}

async function readRows(target) {
  const {name, end} = target;
  const added = await fetchJson("/api/metrics", {run: name, start: end});
  if (target.name !== name || target.end !== end) return false;  // another run was chosen meanwhile
  if (added.start < end) target.rows.clear();  // the training has resumed from a checkpoint
  for (const row of added.rows) {
    // A training that resumes from a checkpoint repeats steps. Rows of later steps are from its
    // earlier attempt.
    for (const step of target.rows.keys()) if (step > row.step) target.rows.delete(step);
    target.rows.set(row.step, {...target.rows.get(row.step), ...row});
  }
  Object.assign(target.charts, added.charts);
  target.end = added.end;
  return added.rows.length > 0;
}


// Headline numbers

function showFacts() {
  const state = states.find(candidate => candidate.run === run.name);
  const steps = stepCount(run);
  const total = state && state.total_steps !== null ? ` of ${state.total_steps}` : "";
  let facts = `step ${steps}${total}`;
  if (state && state.done) facts = `trained for ${plural(steps, "step")}`;
  if (state && state.failure) facts = `failed at step ${steps}${total}: ${state.failure}`;
  byId("facts").textContent = facts;
  showTiles();
}

// Number of finished steps. The rows count steps from 0.
function stepCount(target) {
  return target.rows.size ? 1 + Math.max(...target.rows.keys()) : 0;
}

function showTiles() {
  const tiles = [];
  const add = (title, value, note) => tiles.push(element("div", null, [
    element("dt", title), element("dd", value, [element("small", note)])]));
  const values = name => [...run.rows.values()].filter(row => typeof row[name] === "number");

  const rewards = values("reward/mean").map(row => row["reward/mean"]);
  if (rewards.length) {
    const count = Math.min(5, rewards.length);  // number of steps at each end that are averaged
    const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
    const newest = mean(rewards.slice(-count));
    const change = formatDifference(formatNumber(newest - mean(rewards.slice(0, count))));
    let note = `mean of ${plural(count, "step")}`;
    if (count < rewards.length) note = `last ${count} steps; ${change} since the first ${count}`;
    add("reward", formatNumber(newest), note);
  }
  const validations = values("validation/accuracy");
  if (validations.length) {
    const newest = last(validations);
    const before = validations.find(row => row.step < 0);
    let note = newest.step < 0 ? "before training" : `at step ${newest.step + 1}`;
    if (before && before !== newest) note = `${formatPercent(before["validation/accuracy"])} before training`;
    add("validation accuracy", formatPercent(newest["validation/accuracy"]), note);
  }
  const state = states.find(candidate => candidate.run === run.name);
  const {base, trained, ...others} = state ? state.scores : {};
  if (trained !== undefined) {
    add("test score", formatPercent(trained), base === undefined ? "after training" : `${formatPercent(base)} before training`);
  } else if (base !== undefined) {
    add("test score", formatPercent(base), "before training");
  }
  for (const [name, score] of Object.entries(others).slice(0, 3)) add(`test score, ${name}`, formatPercent(score), "");
  byId("tiles").replaceChildren(...tiles);
}


// Charts of metrics

// Return the points of each series of a run, by chart and member. The x of a point is the number of
// its step, counted from 1, and 0 for the validation before training.
function curvesOf(target) {
  const curves = new Map();
  for (const step of [...target.rows.keys()].sort((a, b) => a - b)) {
    for (const [name, value] of Object.entries(target.rows.get(step))) {
      const metric = target.charts[name];
      if (!metric || typeof value !== "number") continue;
      if (!curves.has(metric.chart)) curves.set(metric.chart, new Map());
      const series = curves.get(metric.chart);
      if (!series.has(metric.member)) series.set(metric.member, []);
      series.get(metric.member).push([step + 1, value]);
    }
  }
  return curves;
}

// Return the names of the members of a group of metrics, of both runs together. Those of the group
// "validation" are data sources. All other groups have the same list: the agents, then policies and
// opponents. The position of a name decides its colour.
function members(group = "agent") {
  const membersOf = target => Object.values(target.charts)
    .filter(metric => metric.member && metric.chart.startsWith("validation/") === (group === "validation"))
    .map(metric => metric.member).sort();
  const agents = group === "validation" ? [] : [...run.agents, ...other.agents];
  return [...new Set([...agents, ...membersOf(run), ...membersOf(other)])];
}

function colourOf(member, ordered) {
  const position = ordered.indexOf(member);
  return `var(--c${(position < 0 ? ordered.length : position) % COLOURS})`;
}

function drawCharts() {
  const curves = curvesOf(run);
  const otherCurves = other.name ? curvesOf(other) : new Map();
  const search = byId("named").value.trim().toLowerCase();
  const metrics = new Map();  // title and unit, by name of the chart
  for (const target of [other, run]) {
    for (const metric of Object.values(target.charts)) metrics.set(metric.chart, metric);
  }
  const position = name => KEY_CHARTS.includes(name) ? KEY_CHARTS.indexOf(name) : KEY_CHARTS.length;
  const isZero = name => [...curves.get(name).values()].flat().every(point => Math.abs(point[1]) < ZERO);
  const names = [...curves.keys()]
    .filter(name => `${name} ${metrics.get(name).title}`.toLowerCase().includes(search))
    .filter(name => ZERO_CHARTS.includes(name) || !isZero(name))
    .filter(name => search || ![BAND.low, BAND.high].includes(name))
    .filter(name => search || name !== "outcome/mean" || !sameValues(curves, "outcome/mean", "reward/mean"))
    .sort((a, b) => position(a) - position(b) || metrics.get(a).title.localeCompare(metrics.get(b).title));
  const shown = names.filter(name => KEY_CHARTS.includes(name) || search);
  const folded = names.filter(name => !shown.includes(name));
  const details = byId("more");
  details.hidden = !folded.length;
  details.firstChild.textContent = plural(folded.length, "further metric");

  const smoothing = SMOOTHING_STEPS[byId("smoothing").value];
  byId("smoothing_text").textContent = smoothing === 1 ? "off" : `mean of ${smoothing} steps`;
  const visible = details.open ? [...shown, ...folded] : shown;
  for (const name of [...charts.keys()].filter(name => !visible.includes(name))) removeChart(name);
  for (const name of visible) {
    if (!charts.has(name)) charts.set(name, metricChart(metrics.get(name)));
    const ordered = members(name.split("/")[0]);
    const lines = [
      ...chartLines(run, name, curves, ordered, DASHES[0]),
      ...chartLines(other, name, otherCurves, ordered, DASHES[1]),
    ];
    charts.get(name).show({lines, baseline: baselineOf(name, curves), smoothing});
  }
  place(byId("charts"), shown);
  place(byId("further"), details.open ? folded : []);
  byId("no_curves").hidden = run.rows.size > 0;
}

function metricChart({chart, title, unit}) {
  return lineChart({
    title, detail: chart, unit: UNITS[unit],
    xAxis: {title: "training step", tickMinStep: 1, format: ",d"},
    xLabel: x => x === 0 ? "before training" : `step ${x}`,
  });
}

// Put the figures of charts into a container in this order, without moving those that are in place.
function place(container, names) {
  names.forEach((name, index) => {
    const {figure} = charts.get(name);
    if (container.children[index] !== figure) container.insertBefore(figure, container.children[index] || null);
  });
}

function removeChart(name) {
  charts.get(name).remove();
  charts.get(name).figure.remove();
  charts.delete(name);
}

function removeCharts() {
  for (const name of [...charts.keys()]) removeChart(name);
}

function sameValues(curves, a, b) {
  return JSON.stringify([...(curves.get(a) || [])]) === JSON.stringify([...(curves.get(b) || [])]);
}

function chartLines(target, name, curves, ordered, dash) {
  const series = [...(curves.get(name) || [])];
  const rank = member => ordered.includes(member) ? ordered.indexOf(member) : ordered.length;
  series.sort((a, b) => rank(a[0]) - rank(b[0]));
  const isOther = target === other;
  return series.map(([member, points]) => {
    let colour = isOther ? "var(--c1)" : "var(--c0)";
    if (member) colour = colourOf(member, ordered);
    const runName = other.name ? target.name : "";
    return {
      id: `${isOther ? "other" : "run"} ${member}`, label: member || runName, points, colour, dash,
      detail: [member, runName].filter(Boolean).join(", "),
      isSparse: isSparse(points),
      band: name === BAND.chart ? bandOf(curves) : [],
    };
  });
}

// True if a metric was measured in some steps only, as validations are.
function isSparse(points) {
  return points.length < 1 + last(points)[0] - points[0][0];
}

function bandOf(curves) {
  const low = curves.get(BAND.low);
  const high = curves.get(BAND.high);
  if (!low || !high) return [];
  const highs = new Map(high.get(""));
  return low.get("").filter(([x]) => highs.has(x)).map(([x, value]) => [x, value, highs.get(x)]);
}

// The value of the untrained team, for charts of one line that begin before training.
function baselineOf(name, curves) {
  const series = curves.get(name);
  if (!name.startsWith("validation/") || !series || series.size > 1) return null;
  const [[x, y]] = [...series.values()][0];
  const metric = Object.values(run.charts).find(candidate => candidate.chart === name);
  return x === 0 ? {y, label: `untrained ${UNITS[metric.unit].value(y)}`} : null;
}


// Comparison with another run

async function compareRuns() {
  const name = byId("other").value;
  const chosenRun = run.name;
  Object.assign(other, emptyRun(name));
  byId("differences").hidden = !name;
  byId("different").replaceChildren();
  byId("key").replaceChildren(...(name ? [run.name, name].map((label, index) => {
    const swatch = element("i", null);
    swatch.style.borderTopStyle = index ? "dashed" : "solid";
    return element("li", null, [swatch, element("span", label)]);
  }) : []));
  if (name) {
    const agents = await fetchJson("/api/agents", {run: name}).catch(() => []);
    if (name !== other.name) return;  // another run was chosen meanwhile
    other.agents = agents;
    await readNewRows(other);
    const differences = await fetchJson("/api/compare", {a: chosenRun, b: name});
    if (chosenRun !== run.name || name !== other.name) return;  // another run was chosen meanwhile
    showDifferences(differences);
  }
  if (run.rows.size) drawCharts();
}

function showDifferences({settings, scores}) {
  const format = value => value === null ? "not set" : JSON.stringify(value);
  const settingRows = Object.entries(settings)
    .map(([key, [first, second]]) => [key, format(first), format(second), ""]);
  const scoreRows = scores.map(score => [
    `${score.state} ${score.metric} (${plural(score.tasks, "task")})`,
    formatPercent(score.first),
    formatPercent(score.second),
    `${formatDifference(minusSign(formatTenths(100 * (score.second - score.first))))} points `
      + minusSign(`[${formatTenths(100 * score.low)}, ${formatTenths(100 * score.high)}]`),
  ]);
  const heading = scores.length ? "difference, with its 95 % interval" : "";
  const rows = [
    ...scoreRows,
    ...(settingRows.length ? settingRows : [["the same settings", "", "", ""]]),
  ];
  const tableRow = (cell, texts) => element("tr", null, texts.map(text => element(cell, text)));
  byId("different").replaceChildren(
    tableRow("th", ["", run.name, other.name, heading]), ...rows.map(texts => tableRow("td", texts)));
}


// Trajectories

function stepFiles() {
  return files.filter(name => name.startsWith("train/"));
}

async function showFiles() {
  const name = run.name;
  const newFiles = await fetchJson("/api/files", {run: name});
  if (name !== run.name) return;  // another run was chosen meanwhile
  // If this run has no files yet, the page may still show those of the run before.
  if (files.length && newFiles.join() === files.join()) return;
  files = newFiles;
  byId("no_files").hidden = files.length > 0;
  byId("talk").hidden = !files.length;

  const select = byId("file");
  const chosen = select.value;
  for (const list of [select, byId("waiting_file")]) {
    list.replaceChildren(...files.map(file => new Option(fileLabel(file), file)));
  }
  const keepsFile = !followsNewest && files.includes(chosen);
  select.value = keepsFile ? chosen : last(stepFiles()) || files[0] || "";
  byId("waiting_file").value = select.value;
  showAgents();
  if (select.value !== chosen || followsNewest) {
    pageStarts = [0];
    await showTrajectories();
  }
}

// Files of steps count from 0, and the page counts steps from 1.
function fileLabel(file) {
  const step = file.match(/^train\/trajectories\/step_(\d+)\.parquet$/);
  if (step) return `step ${Number(step[1]) + 1}`;
  return file.replace(STEPS_FOLDER, "").replace(".parquet", "").replace(/\/part_0+$/, "");
}

function showAgents() {
  const agents = new Set(run.agents);
  for (const metric of Object.values(run.charts)) {
    if (metric.chart.startsWith("agent/*/")) agents.add(metric.member);
  }
  const select = byId("agent");
  const chosen = select.value;
  const options = [...agents].map(name => new Option(name, name));
  select.replaceChildren(new Option("any agent", ""), ...options);
  select.value = agents.has(chosen) ? chosen : "";
}

async function showTrajectories() {
  const file = byId("file").value;
  if (!file) return;
  byId("waiting_file").value = file;
  const filters = Object.fromEntries(FILTERS.map(name => [name, byId(name).value]));
  listRequests += 1;
  const request = listRequests;
  const starts = pageStarts;
  const query = {run: run.name, file, first: last(starts), ...filters};
  const list = await fetchJson("/api/trajectories", query);
  if (request !== listRequests) return;  // another list or run was chosen meanwhile

  const ordered = members();
  byId("list").replaceChildren(...list.rows.map(row => trajectoryRow(row, file, ordered)));
  byId("range").textContent = list.rows.length
    ? `${list.rows[0].index + 1}–${last(list.rows).index + 1} of ${list.total}` : `none of ${list.total}`;
  byId("earlier").disabled = starts.length === 1;
  byId("later").disabled = list.rows.length < list.rows_per_page;
  byId("later").onclick = () => showPage([...starts, last(list.rows).index + 1]);
  byId("earlier").onclick = () => showPage(starts.slice(0, -1));
  if (list.rows.length && (followsNewest || !byId("conversation").src)) byId("list").firstChild.click();
  await showTimeline(file);
}

// Show the last page of a list of page starts.
function showPage(starts) {
  pageStarts = starts;
  showTrajectories();
}

function trajectoryRow(row, file, ordered) {
  const clamped = text => withClass(element("div", text), "clamp");
  const id = element("small", `${row.task_id} · ${plural(row.turns, "turn")}`);
  const task = row.question ? [clamped(row.question), id] : [id];
  if (row.status !== "completed") {
    task.push(withClass(element("small", row.error ? `${row.status}: ${row.error}` : row.status), "bad"));
  }
  const agents = row.agents.map(name => {
    const swatch = withClass(element("span", null), "swatch");
    swatch.style.background = colourOf(name, ordered);
    return row.agents.length > 2 ? swatch : withClass(element("div", null, [swatch, name]), "agent");
  });
  if (row.agents.length > 2) agents.push(element("small", plural(row.agents.length, "agent")));
  const answer = clamped(row.answer);
  if (row.outcome !== null && (row.outcome >= 1 || row.outcome <= 0)) {
    const isRight = row.outcome >= 1;
    answer.prepend(withClass(element("b", isRight ? "✓" : "✗"), isRight ? "good" : "bad"), " ");
  }
  const node = element("tr", null, [
    element("td", row.index + 1),
    element("td", null, task),
    element("td", null, [clamped(row.right_answers.join(" or "))]),
    element("td", null, [answer]),
    element("td", null, agents),
    withClass(element("td", formatNumber(row.reward === null ? row.outcome : row.reward)), "number"),
  ]);
  node.cells[4].title = row.agents.join(", ");
  node.tabIndex = 0;
  node.onclick = () => showTrajectory(node, row.index, file);
  node.onkeydown = event => {
    if (event.key === "Enter") node.click();
    const neighbour = {ArrowDown: node.nextSibling, ArrowUp: node.previousSibling}[event.key];
    if (!neighbour) return;
    event.preventDefault();
    neighbour.focus();
    neighbour.click();
  };
  return node;
}

function showTrajectory(node, index, file) {
  for (const sibling of byId("list").children) sibling.removeAttribute("aria-current");
  node.setAttribute("aria-current", "true");
  const query = {run: run.name, file, index};
  if (accessToken) query.token = accessToken;
  byId("conversation").src = "/trajectory?" + new URLSearchParams(query);
}


// Who waits for whom

function removeTimeline() {
  if (workChart) workChart.remove();
  workChart = null;
  byId("timeline").textContent = "";
  byId("work").replaceChildren();
}

// Show how many trajectories each agent and tool works for over the time of a step.
async function showTimeline(file) {
  const name = run.name;
  const timeline = await fetchJson("/api/timeline", {run: name, file});
  if (name !== run.name || file !== byId("file").value) return;  // another file was chosen meanwhile

  const sentences = [];
  const stepFile = row => `${STEPS_FOLDER}step_${String(row.step).padStart(6, "0")}.parquet`;
  const row = [...run.rows.values()].find(candidate => stepFile(candidate) === file);
  if (row && row["time/collect_s"] !== undefined) {
    const collect = formatNumber(row["time/collect_s"]);
    const update = formatNumber(row["time/update_s"]);
    sentences.push(`The trainers waited ${collect} s for the team, and worked ${update} s.`);
  }
  if (timeline.lines) {
    sentences.push(`The slowest trajectory was number ${timeline.slowest + 1}, of task ${timeline.task}. `
      + `It ended ${formatNumber(timeline.behind)} s after half of the trajectories had ended.`);
  } else {
    sentences.push("No times of calls are recorded for these trajectories, or there are too many of them.");
  }
  removeTimeline();
  byId("timeline").textContent = sentences.join(" ");
  if (!timeline.lines) return;
  workChart = lineChart({
    title: "Trajectories by the agent or tool that works for them", detail: "", unit: UNITS[""],
    xAxis: {title: "seconds since the first call of the step", format: "~g"}, xLabel: x => `${formatNumber(x)} s after the first call`,
  });
  const ordered = [...new Set([...members(), ...Object.keys(timeline.lines)])];
  const lines = Object.entries(timeline.lines).map(([worker, points]) => (
    {id: worker, label: worker, detail: worker, points, colour: colourOf(worker, ordered), dash: [], isSparse: false}));
  byId("work").append(workChart.figure);
  workChart.show({lines, baseline: null, smoothing: 1});
}


// Settings

async function showSettings() {
  const name = run.name;
  if (shownSettings === name) return;
  const config = await fetchJson("/api/config", {run: name});
  if (name !== run.name) return;
  shownSettings = name;
  byId("config_path").textContent = `${name}/config.yaml, with all defaults`;
  const lines = config.split("\n").map(line => {
    const key = line.match(/^([\s-]*)([^\s:'"][^:]*:)(.*)$/);
    const parts = key ? [key[1], element("b", key[2]), key[3]] : [line];
    return element("span", null, [...parts, "\n"]);
  });
  byId("config").replaceChildren(...lines);
}


// Events, and the loop that looks for new data every second

byId("other").onchange = compareRuns;
byId("named").oninput = drawCharts;
byId("smoothing").oninput = drawCharts;
byId("more").ontoggle = drawCharts;
for (const name of FILTERS) byId(name).oninput = () => showPage([0]);
byId("file").onchange = () => {
  followsNewest = byId("file").value === last(stepFiles());
  showPage([0]);
};
byId("waiting_file").onchange = () => {
  byId("file").value = byId("waiting_file").value;
  byId("file").onchange();
};
for (const name of TABS) byId(`tab_${name}`).onclick = () => chooseTab(name);
for (const form of document.forms) form.onsubmit = event => event.preventDefault();

async function watch() {
  for (let second = 0; ; second++) {
    try {
      const readsLists = second % 5 === 0;
      if (readsLists) await showRuns();
      if (run.name) await refresh(readsLists);
    } catch (error) {
      byId("facts").textContent = `${error.message}; trying again every second`;
    }
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}
watch();
