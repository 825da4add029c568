// Figures as text, and markup that cannot be injected into.

const MIB = 2 ** 20;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

// A template whose values are escaped; {raw: markup} is put in as it is.
export function html(parts, ...values) {
  const shown = values.map((value) =>
    value !== null && typeof value === "object" ? value.raw : String(value).replace(/[&<>"']/g, (c) => ENTITIES[c]),
  );
  return String.raw({ raw: parts }, ...shown);
}

export async function get(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error.message), { refused: true });
  return body;
}

export function mib(bytes) {
  return bytes === null || bytes === undefined ? "—" : Math.round(bytes / MIB).toLocaleString("en-US");
}

export function seconds(value) {
  return value.toFixed(1);
}

export function layersText(ranks) {
  const known = ranks.filter((rank) => rank.layers_expected);
  if (!known.length) return "—";
  const slowest = known.reduce((a, b) => (b.layers_done < a.layers_done ? b : a));
  return slowest.layers_done === slowest.layers_expected
    ? String(slowest.layers_expected)
    : `${slowest.layers_done} of ${slowest.layers_expected}`;
}

export function outcome(name) {
  return html`<span class="outcome ${name}">${name}</span>`;
}
