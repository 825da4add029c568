// The built-in page: a list of runs, one run live, two runs over each other. Reads /api only.
import { compareCharts, runCharts } from "./charts.js";
import { get, html, layersText, mib, outcome, seconds } from "./text.js";

const LIVE_MS = 500;
const IDLE_MS = 2000;
const view = document.querySelector("#view");
const list = document.querySelector("#runs");
let shown = ""; // what the view holds now, so that a refresh keeps scroll and zoom
let timer = 0;

function route() {
  const [kind, ...names] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  return { kind, names };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // no name of ours: the API says that there is no such run
  }
}

async function refresh() {
  clearTimeout(timer);
  let pause = IDLE_MS;
  try {
    const [{ runs }, { alerts }] = await Promise.all([get("api/runs?limit=100"), get("api/alerts")]);
    showAlerts(alerts);
    showList(runs);
    const { kind, names } = route();
    if (kind === "compare" && names[1]) await showComparison(names[0], names[1]).catch(showRefusal);
    else if (kind === "run" && names[0]) await showRun(names[0], names[1], runs).catch(showRefusal);
    else if (runs.length) location.replace("#/run/" + encodeURIComponent((runs.find((run) => run.ranks) ?? runs[0]).run));
    else empty();
    if (runs.some((run) => run.outcome === "loading")) pause = LIVE_MS;
    document.querySelector("#state").textContent = "";
  } catch (error) {
    document.querySelector("#state").textContent = error.message;
  }
  timer = setTimeout(refresh, pause);
}

// What the API refuses, in its words; that it does not answer at all is told above, and the view stays.
function showRefusal(error) {
  if (!error.refused) throw error;
  frame("refused " + error.message, html`<p class="damaged">${error.message}</p>`);
}

function empty() {
  frame("empty", html`<p>No run is recorded yet. Start one:</p><pre>loadpeak run -- vllm serve MODEL</pre>`);
}

function showAlerts(alerts) {
  const firing = alerts.filter((alert) => alert.status === "firing");
  const box = document.querySelector("#alerts");
  box.hidden = !firing.length;
  box.innerHTML = firing
    .slice(0, 8)
    .map((alert) => {
      const text = alert.annotations.summary ?? "";
      return html`<p><b class="${alert.labels.severity ?? ""}">${alert.labels.alertname}</b> ${text}</p>`;
    })
    .join("");
}

function showList(runs) {
  const { kind, names } = route();
  const chosen = kind === "run" ? [names[0]] : names;
  const options = runs.filter((run) => run.ranks).map((run) => run.run);
  const entries = runs.map((run) => {
    const mark = chosen.includes(run.run) ? "chosen" : "";
    const href = "#/run/" + encodeURIComponent(run.run);
    if (!run.ranks) {
      const [first] = run.damage;
      return html`<a class="run ${mark}" href="${href}"><span class="top"><span>${run.run}</span>
        <span class="outcome damaged">damaged</span></span>
        <span class="faint">${first.file} ${first.reason}</span></a>`;
    }
    const peak = Math.max(...run.ranks.map((rank) => rank.load_peak_bytes ?? -1));
    const damaged = run.damage.length ? html` <span class="damaged">damaged</span>` : "";
    return html`<a class="run ${mark}" href="${href}"><span class="top"><b>${run.variant}</b>
      <span class="outcome ${run.outcome}">${run.outcome}</span></span>
      <span class="faint">${run.run}</span>${{ raw: damaged }}<br />
      load peak ${mib(peak < 0 ? null : peak)} MiB · layers ${layersText(run.ranks)}</a>`;
  });
  const form = list.querySelector("form");
  if (!form || form.dataset.options !== options.join()) {
    list.innerHTML = comparisonForm(options, kind === "compare" ? names : [options[1], options[0]]) + "<div></div>";
    list.querySelector("form").dataset.options = options.join();
    list.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const { baseline, fix } = event.target.elements;
      location.hash = `#/compare/${encodeURIComponent(baseline.value)}/${encodeURIComponent(fix.value)}`;
    });
  }
  list.querySelector("div").innerHTML = entries.join("");
}

function comparisonForm(options, [baseline, fix]) {
  const select = (name, value) =>
    html`<select name="${name}" aria-label="${name}">${{
      raw: options
        .map((run) => html`<option value="${run}" ${{ raw: run === value ? "selected" : "" }}>${run}</option>`)
        .join(""),
    }}</select>`;
  return html`<form>${{ raw: select("baseline", baseline) }} ${{ raw: select("fix", fix) }}
    <button>Compare</button></form>`;
}

function frame(key, markup) {
  if (shown !== key) {
    view.innerHTML = markup;
    shown = key;
  }
}

async function showRun(name, wanted, runs) {
  const short = runs.find((run) => run.run === name);
  if (short && !short.ranks) {
    const items = short.damage.map((place) => html`<li>${place.file}: ${place.reason}</li>`);
    frame("damaged " + name, html`<h2>${name}</h2><p class="damaged">This run is damaged.</p><ul>${{ raw: items.join("") }}</ul>`);
    return;
  }
  const path = "api/runs/" + encodeURIComponent(name);
  const run = await get(path);
  const number = wanted ?? run.ranks[0]?.rank;
  const timeline = number === undefined ? null : await get(`${path}/timeline?rank=${encodeURIComponent(number)}`);
  frame(
    `run ${name} ${number}`,
    html`<h2></h2><p class="notes"></p><div class="figures"></div><progress hidden></progress>
      <h3>Memory over time</h3><div class="chart" id="time"></div>
      <h3>Per layer</h3><div class="chart" id="layers"></div>`,
  );
  const rank = run.ranks.find((found) => found.rank === timeline?.rank);
  const others = run.ranks.length > 1 ? run.ranks.map((found) => rankLink(name, found.rank, rank?.rank)).join(" ") : "";
  view.querySelector("h2").innerHTML =
    html`${run.header.variant} · ${{ raw: outcome(run.outcome) }} · ${modelName(run.header.model)} ${{ raw: others }}`;
  view.querySelector(".notes").innerHTML = notes(run, rank);
  if (!rank) return;
  view.querySelector(".figures").innerHTML = figures(rank);
  const bar = view.querySelector("progress");
  bar.hidden = !rank.layers_expected;
  bar.max = rank.layers_expected ?? 1;
  bar.value = rank.layers_done;
  runCharts(timeline, rank);
}

function modelName(model) {
  return model ? model.replace(/\/+$/, "").split("/").slice(-2).join("/") : "model not known";
}

function rankLink(name, number, current) {
  const text = `rank ${number}`;
  return number === current ? html`<b>${text}</b>` : html`<a href="#/run/${encodeURIComponent(name)}/${number}">${text}</a>`;
}

function notes(run, rank) {
  const lines = [];
  if (rank?.failure) lines.push(html`<span class="${rank.failure.outcome}">${rank.failure.reason}</span>`);
  if (rank?.failure?.outcome === "oom")
    lines.push(html`Try <code>--release moe-layer</code> or <code>--split-limit keep</code>; or start once more with
      <code>LOADPEAK_MEMORY_HISTORY=1000000</code> and ask <code>loadpeak whatif latest</code> what would have fitted.`);
  if (rank?.device?.kind === "resident") lines.push("No GPU is in use: device figures are the resident memory of the process.");
  if (rank?.sampler_warning) lines.push(html`${rank.sampler_warning}`);
  for (const fix of rank?.fixes ?? []) if (!fix.active) lines.push(html`${fix.name} ${fix.value} is inactive: ${fix.detail}`);
  for (const place of run.damage.slice(0, 3))
    lines.push(html`<span class="damaged">${place.file}${place.line_number ? ` line ${place.line_number}` : ""} ${place.reason}</span>`);
  return lines.join("<br />");
}

function figures(rank) {
  const total = rank.device?.total_bytes ?? null;
  const entries = [
    ["phase", rank.phase],
    ["layers", layersText([rank])],
    ["device used, MiB", mib(rank.device_used_bytes)],
    ["load peak, MiB", mib(rank.load_peak_bytes)],
    ["headroom, MiB", mib(rank.load_headroom_bytes)],
    ["device peak, MiB", mib(rank.device_used_peak_bytes)],
    ["device total, MiB", mib(total)],
    ["reserved peak, MiB", mib(rank.reserved_peak_bytes)],
    ["allocated peak, MiB", mib(rank.allocated_peak_bytes)],
    ["retries", rank.retries ?? "—"],
    ["since start, s", seconds(rank.updated_at_seconds - rank.started_at_seconds)],
  ];
  return entries.map(([name, value]) => html`<div><span>${name}</span><b>${value}</b></div>`).join("");
}

async function showComparison(baseline, fix) {
  const query = `api/compare?baseline=${encodeURIComponent(baseline)}&fix=${encodeURIComponent(fix)}`;
  const names = [baseline, fix].map((name) => "api/runs/" + encodeURIComponent(name));
  const [result, ...rest] = await Promise.all([
    get(query),
    ...names.map((path) => get(path)),
    ...names.map((path) => get(path + "/timeline?points=1200")),
  ]);
  frame(
    `compare ${baseline} ${fix}`,
    html`<h2></h2><table id="figures"></table>
      <h3>Device memory, by seconds since start</h3><div class="chart" id="time"></div>
      <h3>Reserved memory, by layer</h3><div class="chart" id="layers"></div>`,
  );
  const loadPeaks = ["baseline", "fix"].map((side) =>
    Math.max(...result.ranks.map((pair) => pair[side]?.load_peak_bytes ?? -1)),
  );
  const reduction = Math.min(...loadPeaks) < 0 ? 0 : loadPeaks[0] - loadPeaks[1];
  view.querySelector("h2").textContent =
    `${result.baseline.variant} and ${result.fix.variant}` +
    (reduction ? `: worst load peak ${mib(Math.abs(reduction))} MiB ${reduction > 0 ? "lower" : "higher"}` : "");
  const rows = [
    ["worst device peak", "worst_device_peak_bytes"],
    ["worst reserved peak", "worst_reserved_peak_bytes"],
    ["allocated peak", "allocated_peak_bytes"],
    ["ready allocated", "ready_allocated_bytes"],
  ].map(([name, field]) => row(name + ", MiB", mib(result.baseline[field]), mib(result.fix[field])));
  rows.unshift(row("worst load peak, MiB", ...loadPeaks.map((peak) => mib(peak < 0 ? null : peak))));
  for (const [name, field] of [["outcome", "outcome"], ["allocator retries", "allocator_retries"], ["allocator setting", "alloc_conf"], ["run", "run"]])
    rows.push(row(name, result.baseline[field] ?? "—", result.fix[field] ?? "—"));
  const equal = { true: "equal to the byte on every rank", false: "different" }[result.ready_allocated_equal] ?? "not known for both";
  rows.push(row("ready live allocation", equal, ""));
  view.querySelector("#figures").innerHTML =
    html`<tr><th></th><th class="number">${result.baseline.variant}</th><th class="number">${result.fix.variant}</th></tr>` + rows.join("");
  compareCharts(rest.slice(0, 2), rest.slice(2));
}

function row(name, first, second) {
  return html`<tr><td>${name}</td><td class="number">${first}</td><td class="number">${second}</td></tr>`;
}

document.querySelector("#where").textContent = location.host;
addEventListener("hashchange", refresh);
refresh();
