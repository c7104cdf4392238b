// The timeline's controls: which step, which ranks, which stretch of time, and what is read off under the pointer.

const LEAST_US = 2; // the shortest stretch that is shown

function showTimeline() {
  if (!steps.length) return;
  const canvas = find("canvas");
  const view = {
    index: 0, from: 0, to: 1, hidden: new Set(), focused: null, picked: null, pointer: null, scene: null,
  };
  const one = { canvas, view, asked: false };
  const why = (step) => (step.why ? `, ${step.why}` : "");
  find("step").append(...steps.map((step, i) =>
    element("option", { value: i }, `step ${step.step}${why(step)}: ${milliseconds(step.length_us)}`)));
  document.querySelector(".tools").hidden = false;
  chips(one);
  buttons(one);
  keys(one);
  pointers(one);
  wheel(one);
  asTable(one);
  redraws.push(() => { hatches = new Map(); legend(); draw(one); });
  new ResizeObserver(() => draw(one)).observe(find("picture"));
  legend();
  choose(one, 0);
}

// The canvas says what it shows in attributes, for those who cannot see it.
function draw(one) {
  if (one.asked) return;
  one.asked = true;
  requestAnimationFrame(() => {
    one.asked = false;
    const { canvas, view } = one;
    const width = find("picture").clientWidth - 2;
    const step = prepare(view.index);
    view.scene = { ...arrange(step, view.hidden), ...view, scene: null, width, gutter: width < 560 ? 36 : 76 };
    canvas.dataset.painted = paint(canvas, view.scene);
    canvas.dataset.from = view.from.toFixed(1);
    canvas.dataset.to = view.to.toFixed(1);
    canvas.dataset.step = step.step;
    canvas.dataset.ranks = view.scene.rows.map((row) => row.rank).join(",");
    canvas.dataset.focused = view.focused ?? "";
    canvas.dataset.picked = view.picked?.name ?? "";
    canvas.setAttribute("aria-label", `Timeline of step ${step.step}, from ${milliseconds(view.from)} to `
      + `${milliseconds(view.to)}, ${view.scene.rows.length} ranks`);
  });
}

function choose(one, index) {
  const { view } = one;
  view.index = clamp(index, 0, steps.length - 1);
  view.picked = null;
  find("step").value = view.index;
  find("before").disabled = view.index === 0;
  find("after").disabled = view.index === steps.length - 1;
  hideTip();
  fit(one);
  if (find("table").open) fillTable(one);
}

// The whole step, with a little room on both sides.
function bounds(one) {
  const step = prepare(one.view.index);
  const begins = step.ranks.map((rank) => rank.begin_us).filter(isNumber);
  const ends = step.ranks.map((rank) => rank.end_us).filter(isNumber);
  const low = Math.min(0, ...begins);
  const high = Math.max(step.length_us || 1, ...ends);
  const room = (high - low) * 0.012;
  return [low - room, high + room];
}

function show(one, from, to) {
  const [low, high] = bounds(one);
  const span = clamp(to - from, Math.min(LEAST_US, high - low), high - low);
  const middle = clamp((from + to) / 2, low + span / 2, high - span / 2);
  [one.view.from, one.view.to] = [middle - span / 2, middle + span / 2];
  draw(one);
}

const fit = (one) => show(one, ...bounds(one));
const span = (one) => one.view.to - one.view.from;
const pan = (one, us) => show(one, one.view.from + us, one.view.to + us);

function zoom(one, factor, at = (one.view.from + one.view.to) / 2) {
  const [low, high] = bounds(one);
  const by = clamp(factor, LEAST_US / span(one), (high - low) / span(one));
  show(one, at - (at - one.view.from) * by, at + (one.view.to - at) * by);
}

function timeAt(one, x) {
  const { width, gutter } = one.view.scene;
  return one.view.from + ((x - gutter) / (width - gutter)) * span(one);
}

function chips(one) {
  const found = new Set(steps.flatMap((step) => list(step.ranks).map((rank) => rank.rank)));
  const ranks = [...found].sort((a, b) => a - b);
  if (ranks.length < 2) return;
  const host = find("ranks");
  const toggles = ranks.map((rank) => {
    const button = element("button", { type: "button", "aria-label": `Show rank ${rank}` }, `${rank}`);
    button.addEventListener("click", () => {
      if (!one.view.hidden.delete(rank)) one.view.hidden.add(rank);
      press();
    });
    return button;
  });
  const all = element("button", { type: "button" });
  const press = () => {
    all.textContent = one.view.hidden.size ? "All" : "First only";
    toggles.forEach((button, i) => button.setAttribute("aria-pressed", String(!one.view.hidden.has(ranks[i]))));
    hideTip();
    draw(one);
  };
  all.addEventListener("click", () => {
    one.view.hidden = new Set(one.view.hidden.size ? [] : ranks.slice(1));
    press();
  });
  host.append(element("span", { class: "muted" }, "Ranks"), ...toggles, all);
  press();
}

function buttons(one) {
  find("step").addEventListener("change", () => choose(one, Number(find("step").value)));
  find("before").addEventListener("click", () => choose(one, one.view.index - 1));
  find("after").addEventListener("click", () => choose(one, one.view.index + 1));
  find("in").addEventListener("click", () => zoom(one, 0.5));
  find("out").addEventListener("click", () => zoom(one, 2));
  find("fit").addEventListener("click", () => fit(one));
}

function keys(one) {
  const moves = {
    ArrowLeft: () => pan(one, -span(one) / 8), ArrowRight: () => pan(one, span(one) / 8),
    "+": () => zoom(one, 0.7), "=": () => zoom(one, 0.7), "-": () => zoom(one, 1 / 0.7), "0": () => fit(one),
    ArrowDown: () => focusRank(one, 1), ArrowUp: () => focusRank(one, -1),
    n: () => walk(one, 1), p: () => walk(one, -1),
    Escape: () => { one.view.picked = null; hideTip(); draw(one); },
  };
  const turns = { "[": () => choose(one, one.view.index - 1), "]": () => choose(one, one.view.index + 1) };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input, textarea")) return;
    const here = event.target === one.canvas;
    const move = turns[event.key] ?? (here ? moves[event.key] ?? moves[event.key.toLowerCase()] : null);
    if (!move) return;
    event.preventDefault();
    move();
  });
}

function focusRank(one, by) {
  const { rows } = one.view.scene;
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.rank === one.view.focused);
  one.view.focused = rows[clamp(at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by, 0, rows.length - 1)].rank;
  one.view.picked = null;
  hideTip();
  find("said").textContent = `rank ${one.view.focused}`;
  draw(one);
}

// To the next event of the rank in focus, by the order of their starts.
function walk(one, by) {
  const { view } = one;
  const row = view.scene.rows.find((each) => each.rank === view.focused) ?? view.scene.rows[0];
  if (!row?.events.length) return;
  const at = row.events.indexOf(view.picked);
  const first = row.events.findIndex((event) => event.end > view.from);
  const next = row.events[clamp(at < 0 ? first : at + by, 0, row.events.length - 1)];
  [view.focused, view.picked] = [row.rank, next];
  if (next.start < view.from || next.start > view.to)
    show(one, next.start - span(one) * 0.1, next.start + span(one) * 0.9);
  draw(one);
  const { width, gutter } = view.scene;
  const x = gutter + ((clamp(next.start, view.from, view.to) - view.from) / span(one)) * (width - gutter);
  showTip(one, next, bubblesDuring(row, next), x, row.y + row.height);
  find("said").textContent = find("tip").textContent;
}

const bubblesDuring = (row, item) =>
  row.bubbles.filter((bubble) => item.lane === "host" && bubble.start < item.end && bubble.end > item.start);

function legend() {
  const ranks = steps.flatMap((_, i) => prepare(i).ranks);
  const seen = new Set(ranks.flatMap((rank) => rank.events.map((event) => event.tone)));
  const words = {
    forward: "forward", compute: "backward and other compute", "input gradient": "input gradient",
    "weight gradient": "weight gradient", "waiting for data": "data", update: "update",
    host: "host",
    queued: "bucket is ready, queued", agree: "headers", exchange: "exchange",
  };
  const plain = Object.entries(words).filter(([name]) => seen.has(name)).map(([name, text]) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = tone(name);
    return element("li", {}, swatch, text);
  });
  const bubbles = ranks.flatMap((rank) => rank.bubbles);
  const travelling = (cause) => bubbles.find((bubble) => bubble.cause === cause && !bubble.slowness);
  const kinds = [
    [bubbles.find((bubble) => bubble.slowness), "waits for a slower rank"],
    ...causes.map((cause) => [travelling(cause), isPhase(cause) ? cause : `waits for messages: ${cause}`]),
  ];
  const hatched = kinds.filter(([bubble]) => bubble).map(([bubble, text]) => {
    const swatch = element("canvas", { class: "swatch", width: 36, height: 24 });
    const pen = swatch.getContext("2d");
    pen.scale(2, 2);
    pen.fillStyle = hatch(pen, bubble);
    pen.fillRect(0, 0, 18, 12);
    return element("li", {}, swatch, text);
  });
  find("legend").replaceChildren(...plain, ...hatched);
}

function asTable(one) {
  const choice = find("table-rank");
  for (const rank of prepare(0).ranks) choice.append(element("option", { value: rank.rank }, rank.rank));
  choice.addEventListener("change", () => fillTable(one));
  find("table").addEventListener("toggle", () => { if (find("table").open) fillTable(one); });
}

function fillTable(one) {
  const row = prepare(one.view.index).ranks.find((rank) => String(rank.rank) === find("table-rank").value);
  const columns = ["lane", "name", "start ms", "takes ms", "size", "micro-batch", "bucket", "peer", "stage"];
  const waits = list(row?.bubbles).map((bubble) => ({ ...bubble, lane: "bubble", name: bubble.cause }));
  const lines = [...list(row?.events), ...waits].sort((a, b) => a.start - b.start);
  const cells = (values) => values.map((text) => element("td", {}, text));
  find("table").querySelector("thead").replaceChildren(
    element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
  find("table").querySelector("tbody").replaceChildren(
    ...lines.map((line) => element("tr", {}, ...cells(figures(line)))));
}

function figures({ lane, name, start, end, bytes, leaf, bucket, peer, stage }) {
  const index = (value) => (isNumber(value) && value >= 0 ? String(value) : "");
  return [lane, name, figure(start / 1000), figure((end - start) / 1000), bytes ? size(bytes) : "",
    index(leaf), index(bucket), index(peer), index(stage)];
}
