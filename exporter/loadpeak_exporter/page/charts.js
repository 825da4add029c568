// The charts, drawn by Plotly. Memory is shown in GiB, so that axes stay short.

const GIB = 2 ** 30;
const COLOURS = { device: "#d9822b", reserved: "#2f7ed8", allocated: "#2e9e6b", first: "#c0392b", second: "#1f8a5b" };
const ARMS = [COLOURS.first, COLOURS.second, "#2f7ed8", "#d9822b", "#8e5bd0", "#5b6675"];
const PHASES = ["#8a94a6", "#b08cd9"];

function layout(xTitle, extra = {}) {
  const style = getComputedStyle(document.body);
  const line = style.getPropertyValue("--line");
  const grid = { gridcolor: "rgba(128,128,128,0.25)", zerolinecolor: "rgba(128,128,128,0.4)", automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style.color, size: 12 },
    margin: { t: 30, r: 12, b: 40, l: 48 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: line ? style.backgroundColor : undefined },
    xaxis: { title: { text: xTitle }, ...grid },
    yaxis: { title: { text: "GiB" }, rangemode: "tozero", ...grid },
    uirevision: "kept",
    ...extra,
  };
}

// Plotly reads names as markup of its own.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function curve(name, points, colour, options = {}) {
  return {
    name: plain(name),
    x: points.map(([x]) => x),
    y: points.map(([, y]) => (y === null || y === undefined ? null : y / GIB)),
    mode: "lines",
    line: { color: colour, width: 2, ...options.line },
    hovertemplate: "%{y:.2f} GiB",
    ...options.trace,
  };
}

const steps = { line: { shape: "hv" } };

function draw(id, traces, chartLayout) {
  const place = document.getElementById(id);
  if (!window.Plotly) {
    place.textContent = "Charts need the package plotly: pip install 'loadpeak[page]'.";
    place.style.height = "auto";
    return;
  }
  const there = traces.filter((trace) => trace.y.some((value) => value !== null));
  window.Plotly.react(place, there, chartLayout, { displayModeBar: false, responsive: true });
}

// Shading for each phase, with its name where there is room for it.
function phases(spans, end) {
  const length = Math.max(end, ...spans.map((span) => span.to_seconds ?? 0));
  const shapes = spans.map((span, index) => ({
    type: "rect",
    xref: "x",
    yref: "paper",
    x0: span.from_seconds,
    x1: span.to_seconds ?? end,
    y0: 0,
    y1: 1,
    line: { width: 0 },
    fillcolor: PHASES[index % 2],
    opacity: 0.12,
    layer: "below",
  }));
  const annotations = spans
    .filter((span) => (span.to_seconds ?? end) - span.from_seconds > length * 0.09)
    .map((span) => ({
      text: span.phase,
      x: span.from_seconds,
      y: 0,
      xref: "x",
      yref: "paper",
      xanchor: "left",
      yanchor: "bottom",
      showarrow: false,
      font: { size: 11 },
      opacity: 0.8,
    }));
  return { shapes, annotations };
}

function lastSecond(timeline) {
  const curves = [timeline.device_used_bytes, timeline.reserved_bytes];
  return Math.max(0, ...curves.map((points) => points.at(-1)?.[0] ?? 0));
}

function layerPoints(rank, field) {
  return rank.layers.map((layer) => [layer.layer, layer[field]]);
}

export function runCharts(timeline, rank) {
  const total = rank.device?.total_bytes;
  const end = lastSecond(timeline);
  const traces = [
    curve("device used", timeline.device_used_bytes, COLOURS.device, steps),
    curve("reserved", timeline.reserved_bytes, COLOURS.reserved),
    curve("allocated", timeline.allocated_bytes, COLOURS.allocated),
  ];
  const peak = rank.device_used_peak_bytes ?? 0;
  // The device's total helps only where the peak comes near it; far above, it would flatten the curves.
  if (total && peak > total / 2)
    traces.push(curve("device total", [[0, total], [end, total]], COLOURS.first, { line: { dash: "dot", width: 1 } }));
  draw("time", traces, layout("seconds since the start of the rank", phases(timeline.phases, end)));
  draw(
    "layers",
    [
      curve("device peak", layerPoints(rank, "device_peak_bytes"), COLOURS.device),
      curve("reserved peak", layerPoints(rank, "reserved_peak_bytes"), COLOURS.reserved, { line: { dash: "dot" } }),
      curve("reserved after", layerPoints(rank, "reserved_bytes"), COLOURS.reserved),
      curve("allocated peak", layerPoints(rank, "allocated_peak_bytes"), COLOURS.allocated),
    ],
    layout("layer"),
  );
}

export function compareCharts(runs, timelines) {
  const variants = runs.map((run) => run.header.variant);
  const names = variants.map((variant, index) =>
    variants.filter((other) => other === variant).length > 1 ? `${variant} ${index + 1}` : variant,
  );
  const colour = (index) => ARMS[index % ARMS.length];
  draw(
    "time",
    timelines.map((timeline, index) => curve(names[index], timeline.device_used_bytes, colour(index), steps)),
    layout("seconds since the start of the rank"),
  );
  draw(
    "layers",
    runs.flatMap((run, index) => [
      curve(`${names[index]}, peak inside`, layerPoints(run.ranks[0], "reserved_peak_bytes"), colour(index), { line: { dash: "dot" } }),
      curve(`${names[index]}, after`, layerPoints(run.ranks[0], "reserved_bytes"), colour(index)),
    ]),
    layout("layer"),
  );
}

// What `loadpeak report` draws: one startup by itself, several over each other.
export function drawReport(drawn) {
  if (drawn.length === 1) runCharts(drawn[0].timeline, { ...drawn[0], device: { total_bytes: drawn[0].device_total_bytes } });
  else compareCharts(drawn.map((one) => ({ header: one, ranks: [one] })), drawn.map((one) => one.timeline));
}
