// The page of `tft dashboard`. The server draws all texts as HTML, with everything escaped. This
// script puts them in their places, and draws the picture of the ranks and the curves.
"use strict";

const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const LETTERS = { t: "", w: "W", b: "B", s: "S", h: "H", z: "Z", x: "X", f: "F", o: "O", u: "?" };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------- texts

function put(name, html) {
  const place = byId(name);
  if (!place) return;
  // what the reader has opened or focused stays so
  const open = [...place.querySelectorAll("details[open]")].map((each) => each.id);
  const scrolled = [...place.querySelectorAll("pre")].map((each) => each.scrollTop);
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const within = focused && focused.closest("details");
  const tag = focused && focused.tagName;
  place.innerHTML = html;
  for (const id of open) if (id && byId(id)) byId(id).open = true;
  [...place.querySelectorAll("pre")].forEach((each, n) => { each.scrollTop = scrolled[n] || 0; });
  if (within && byId(within.id)) byId(within.id).querySelector(tag)?.focus();
}

// ---------------------------------------------------------------- the picture of the ranks

// One cell for each rank, node by node. Only cells that have changed are drawn, in the next frame.
const field = byId("field"), canvas = byId("grid");
const pen = canvas.getContext("2d", { alpha: false });
let codes = [], nodes = [], cell = 20, gap = 6, ratio = 1, colours = {};
let places = new Int32Array(0); // by rank: x and y in pixels of the page, or -1
let nodeOf = new Int32Array(0);
let dirty = new Set(), whole = true, chosen = -1;
const stats = { frames: 0, cells: 0, messages: 0, bytes: 0 };
window.tft = stats; // for tests

function ranksOf(text) {
  return text.split(", ").filter(Boolean).flatMap((part) => {
    const [from, to] = part.split("-").map(Number);
    return Array.from({ length: (to ?? from) - from + 1 }, (_, n) => from + n);
  });
}

function arrange() {
  const count = codes.length, width = Math.max(200, field.clientWidth);
  ratio = Math.min(2, devicePixelRatio || 1);
  cell = count <= 64 ? 26 : count <= 512 ? 18 : count <= 2048 ? 12 : 8;
  gap = cell >= 18 ? 10 : 4;
  const label = cell >= 18 ? 14 : 0;
  places = new Int32Array(2 * count).fill(-1);
  nodeOf = new Int32Array(count).fill(-1);
  let x = 0, y = 0, high = 0;
  labels = [];
  byId("picture").classList.toggle("empty", !count);
  for (const [node, host, ranks] of nodes) {
    const members = ranksOf(ranks);
    // a node is a block of cells that is about square, and as wide as the page at most
    const across = Math.min(Math.max(1, Math.floor(width / cell)),
      members.length <= 8 ? members.length : Math.ceil(Math.sqrt(members.length)));
    const wide = Math.max(across * cell, label ? 52 : 0), tall = Math.ceil(members.length / across) * cell;
    if (x && x + wide > width) { x = 0; y += high + gap; high = 0; }
    if (label) labels.push([x, y, node < 0 ? "no node" : `node ${node}`]);
    members.forEach((rank, n) => {
      if (rank >= count) return;
      places[2 * rank] = x + (n % across) * cell;
      places[2 * rank + 1] = y + label + Math.floor(n / across) * cell;
      nodeOf[rank] = node;
    });
    x += wide + gap;
    high = Math.max(high, tall + label);
  }
  const height = count ? y + high + 2 : 0;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  whole = true;
}
let labels = [];

function theme() {
  for (const letter of Object.keys(LETTERS)) colours[letter] = colour(`--${letter}`);
  for (const name of ["back", "text", "soft", "ink"]) colours[name] = colour(`--${name}`);
}

// Each state has a shape besides its colour, and a letter where there is room.
function shape(to, letter, x, y, size) {
  const pad = size >= 12 ? 1.5 : 0.75, a = x + pad, b = y + pad, s = size - 2 * pad;
  to.fillStyle = to.strokeStyle = colours[letter];
  to.lineWidth = Math.max(1, size / 8);
  const line = (...points) => {
    to.beginPath();
    points.forEach(([p, q], n) => (n ? to.lineTo(a + p * s, b + q * s) : to.moveTo(a + p * s, b + q * s)));
  };
  const half = to.lineWidth / 2;
  switch (letter) {
    case "t": to.fillRect(a + s * 0.1, b + s * 0.1, s * 0.8, s * 0.8); return;
    case "w": to.strokeRect(a + half, b + half, s - 2 * half, s - 2 * half); break;
    case "b": line([0, 1], [0.5, 0], [1, 1]); to.fill(); break;
    case "s": line([0, 0], [0.5, 1], [1, 0]); to.fill(); break;
    case "h": line([0.5, 0], [1, 0.5], [0.5, 1], [0, 0.5]); to.fill(); break;
    case "z": to.fillRect(a, b, s * 0.38, s); to.fillRect(a + s * 0.62, b, s * 0.38, s); return;
    case "x": line([0, 0], [1, 1]); to.stroke(); line([1, 0], [0, 1]); to.stroke(); return;
    case "f": to.fillRect(a, b, s, s); break;
    case "o": to.beginPath(); to.arc(a + s / 2, b + s / 2, s * 0.3, 0, 7); to.stroke(); return;
    default: to.fillRect(a + s * 0.35, b + s * 0.35, s * 0.3, s * 0.3); return;
  }
  if (size < 15) {
    if (letter === "f") { to.fillStyle = colours.ink; to.fillRect(a + s * 0.4, b + s * 0.15, s * 0.2, s * 0.7); to.fillRect(a + s * 0.15, b + s * 0.4, s * 0.7, s * 0.2); }
    return;
  }
  to.fillStyle = letter === "w" ? colours.text : colours.ink;
  to.font = `bold ${Math.round(size * 0.5)}px sans-serif`;
  to.textAlign = "center";
  to.textBaseline = "middle";
  to.fillText(LETTERS[letter], x + size / 2, y + size / 2 + (letter === "b" ? size * 0.12 : letter === "s" ? -size * 0.1 : 0.5));
}

function drawCell(rank) {
  const x = places[2 * rank], y = places[2 * rank + 1];
  if (x < 0) return;
  stats.cells += 1;
  pen.fillStyle = colours.back;
  pen.fillRect(x, y, cell, cell);
  shape(pen, codes[rank], x, y, cell);
  if (rank === chosen) {
    pen.strokeStyle = colours.text;
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, cell - 1.5, cell - 1.5);
  }
}

function frame() {
  stats.frames += 1;
  requestAnimationFrame(frame);
  if (!whole && !dirty.size) return;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  if (whole) {
    pen.fillStyle = colours.back;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = colours.soft;
    pen.font = "11px sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    for (const [x, y, text] of labels) pen.fillText(text, x, y + 10);
    for (let rank = 0; rank < codes.length; rank += 1) drawCell(rank);
  } else {
    for (const rank of dirty) drawCell(rank);
  }
  whole = false;
  dirty.clear();
}

function legend() {
  for (const each of document.querySelectorAll("#legend canvas")) {
    const to = each.getContext("2d");
    to.setTransform(2, 0, 0, 2, 0, 0);
    to.clearRect(0, 0, 16, 16);
    shape(to, each.dataset.letter, 0, 0, 16);
  }
}

function under(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  for (let rank = 0; rank < codes.length; rank += 1) {
    const a = places[2 * rank], b = places[2 * rank + 1];
    if (a >= 0 && x >= a && x < a + cell && y >= b && y < b + cell) return rank;
  }
  return -1;
}

canvas.addEventListener("pointermove", (event) => {
  const rank = under(event);
  byId("hover").textContent = rank < 0 ? "" : `rank ${rank}, node ${nodeOf[rank]}`;
});
canvas.addEventListener("pointerleave", () => { byId("hover").textContent = ""; });
canvas.addEventListener("click", (event) => {
  const rank = under(event);
  if (rank >= 0) { byId("rank").value = rank; choose(); }
});

// ---------------------------------------------------------------- one rank

let asked = 0;
async function choose() {
  const text = byId("rank").value;
  if (chosen >= 0) dirty.add(chosen);
  chosen = text === "" ? -1 : Number(text);
  if (chosen >= 0 && chosen < codes.length) dirty.add(chosen);
  await detail();
}

async function detail() {
  const mine = (asked += 1);
  if (chosen < 0) { byId("detail").textContent = ""; return; }
  try {
    const answer = await fetch(`rank?rank=${chosen}`);
    const html = answer.ok ? await answer.text() : "";
    if (mine === asked && byId("detail").innerHTML !== html) byId("detail").innerHTML = html;
  } catch { /* the line above says that there is no connection */ }
}
byId("rank").addEventListener("input", choose);
byId("ask").addEventListener("submit", (event) => { event.preventDefault(); choose(); });
setInterval(() => { if (chosen >= 0 && !document.hidden) detail(); }, 1000);

// ---------------------------------------------------------------- the curves

let points = [], marks = [], plots = [], late = null;

function span(seconds) {
  if (seconds == null) return "-";
  if (seconds < 1) return `${+(1000 * seconds).toPrecision(3)} ms`;
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  return `${+(seconds / 3600).toPrecision(3)} h`;
}

function bands(plot) {
  const to = plot.ctx, { left, top, width, height } = plot.bbox;
  to.save();
  to.fillStyle = colour("--mark");
  to.globalAlpha = 0.55;
  for (const [start, end] of marks) {
    const a = Math.max(left, plot.valToPos(start, "x", true));
    const b = Math.min(left + width, plot.valToPos(end, "x", true));
    if (a < left + width && b > left) to.fillRect(a, top, Math.max(2, b - a), height);
  }
  to.restore();
}

function plot(id, name, text) {
  const place = byId(id);
  place.textContent = "";
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line") } };
  return new uPlot({
    width: Math.max(200, place.clientWidth), height: 200, cursor: { y: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => (low == null ? [0, 1] : id === "times-curve" ? [0, high * 1.1 || 1] : [low, high > low ? high : low + 1]) } },
    axes: [{ ...axis, values: (_, all) => all.map(span) }, { ...axis, size: 64, values: (_, all) => all.map(text) }],
    series: [{ label: "after", value: (_, value) => span(value) },
      { label: name, stroke: () => colour("--curve"), width: 1.5, spanGaps: false, value: (_, value) => text(value) }],
    hooks: { drawClear: [bands] },
  }, [[], []], place);
}

function draw() {
  late = null;
  if (!window.uPlot) return;
  if (!plots.length) {
    plots = [plot("steps-curve", "step", (value) => (value == null ? "-" : `${value}`)), plot("times-curve", "time of a step", span)];
  }
  const at = points.map((each) => each[0]);
  plots[0].setData([at, points.map((each) => each[1])]);
  plots[1].setData([at, points.map((each) => each[2])]);
}
function soon() { late ??= setTimeout(draw, 200); }

// ---------------------------------------------------------------- what the server says

function take(message) {
  for (const [name, html] of Object.entries(message.sections ?? {})) put(name, html);
  if (message.nodes) {
    nodes = message.nodes;
    codes = [...message.codes];
    arrange();
  }
  for (const [rank, letter] of message.ranks ?? []) {
    codes[rank] = letter;
    dirty.add(rank);
  }
  if (message.points) points = message.points;
  if (message.more) points.push(...message.more);
  if (message.marks) marks = message.marks;
  if (message.points || message.more || message.marks) soon();
}

let redraw = null;
function resized() {
  clearTimeout(redraw);
  redraw = setTimeout(() => { arrange(); plots.forEach((each) => each.destroy()); plots = []; soon(); }, 100);
}
let lastWidth = field.clientWidth;
new ResizeObserver(() => {
  if (field.clientWidth !== lastWidth) { lastWidth = field.clientWidth; resized(); }
}).observe(field);
dark.addEventListener("change", () => { theme(); legend(); whole = true; resized(); });

const live = byId("live");
function connected(yes) {
  live.textContent = yes ? "Live." : "No connection to tft dashboard. The page is old. Trying again.";
  live.classList.toggle("lost", !yes);
}
// EventSource gives up after some errors, such as a server that says no: then begin again
function listen() {
  const source = new EventSource("events");
  source.onopen = () => connected(true);
  source.onmessage = (event) => {
    stats.messages += 1;
    stats.bytes += event.data.length;
    take(JSON.parse(event.data));
  };
  source.onerror = () => {
    connected(false);
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

theme();
legend();
arrange();
listen();
requestAnimationFrame(frame);
