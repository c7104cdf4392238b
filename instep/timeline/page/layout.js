// Where the events of a step stand: per rank a track for the thread that trains, one for messages, one per replica.

const laneNames = list(story.timeline?.lanes);
const eventNames = list(story.timeline?.names);
const steps = list(story.timeline?.steps);
const causes = [];

// Pixels, by the number of ranks: the main row of a track, rows nested under it, the row of messages, and between.
const DENSITIES = [
  { upTo: 6, main: 26, sub: 10, line: 14, queue: 4, gap: 4, between: 16 },
  { upTo: 16, main: 14, sub: 6, line: 8, queue: 2, gap: 2, between: 8 },
  { upTo: 32, main: 10, sub: 3, line: 5, queue: 1, gap: 1, between: 4 },
  { upTo: Infinity, main: 7, sub: 2, line: 3, queue: 1, gap: 1, between: 3 },
];
const AXIS = 30;

const COMMUNICATION = { queued: "queued", wait: "waiting for a slower rank", agree: "agree" };
const WORK = {
  forward: "forward", update: "update", data: "waiting for data",
  "input gradient": "input gradient", "weight gradient": "weight gradient",
};

function toneOf(lane, name) {
  if (lane === "communication") return COMMUNICATION[name] ?? "exchange";
  if (lane === "data") return "waiting for data";
  if (lane === "host") return causes.includes(name) ? "wait" : "host";
  return WORK[name] ?? "compute";
}

// Waits for other stages of a pipeline, which follow from its schedule: no rank is slower by them.
const isPhase = (cause) => String(cause).startsWith("pipeline ");

function prepareBubble([start, length, cause, peer]) {
  const name = typeof cause === "number" ? eventNames[cause] : cause;
  return { start, end: start + length, cause: name, peer, slowness: peer >= 0 && !isPhase(name) };
}

const prepared = new Map();

function prepare(index) {
  if (!prepared.has(index)) prepared.set(index, { ...steps[index], ranks: list(steps[index].ranks).map(prepareRank) });
  return prepared.get(index);
}

function prepareRank(told) {
  const tracks = new Map([["", { title: "", items: [], ends: [] }]]);
  const events = list(told.events).map(([lane, name, start, length, bytes, leaf, bucket, peer, stage]) => ({
    rank: told.rank, lane: String(laneNames[lane]), name: String(eventNames[name]), start, end: start + length,
    bytes, leaf, bucket, peer, stage,
  })).filter((event) => event.name !== "step" && isNumber(event.start) && isNumber(event.end));
  events.sort((a, b) => a.start - b.start || b.end - a.end);
  for (const event of events) {
    const thread = ["compute", "data", "host"].includes(event.lane) ? "" : event.lane;
    if (!tracks.has(thread)) tracks.set(thread, { title: thread, items: [], ends: [] });
    const track = tracks.get(thread);
    event.tone = toneOf(event.lane, event.name);
    // Queued buckets wait beside each other, on a line of their own; all else is nested or in a row.
    event.row = event.tone === "queued" ? -1 : thread === "" ? 0 : freeRow(track.ends, event);
    track.items.push(event);
  }
  layer(tracks.get(""));
  const order = (track) => (track.title === "" ? 0 : track.title === "communication" ? 1 : 2);
  return {
    ...told, events, bubbles: list(told.bubbles).map(prepareBubble),
    tracks: [...tracks.values()].sort(
      (a, b) => order(a) - order(b) || a.title.localeCompare(b.title, "en", { numeric: true })),
  };
}

// The main row of the thread that trains shows what its time counts as: compute before data before waits before
// host, and of these the innermost. What is covered in part, as the span of a micro-batch is, stands below as well.
function layer(track) {
  const above = { host: 0, data: 1, update: 2, compute: 3 };
  const rank = (event) => above[event.lane === "compute" && event.name === "update" ? "update" : event.lane];
  const covered = [];
  let open = [];
  for (const event of track.items) {
    open = open.filter((other) => other.end > event.start);
    for (const other of open) covered.push(rank(other) > rank(event) ? event : other);
    open.push(event);
    event.layer = rank(event);
  }
  track.ends = [Infinity]; // the main row is never free for what is below
  const below = [...new Set(covered)].sort((a, b) => a.start - b.start || b.end - a.end)
    .map((event) => ({ ...event, row: freeRow(track.ends, event) }));
  track.items = [...track.items.sort((a, b) => a.layer - b.layer), ...below];
}

// What is nested deeper than that shares the last row.
const DEEPEST = 3;

function freeRow(ends, event) {
  let row = ends.findIndex((end) => end <= event.start + 1e-6);
  if (row < 0) row = Math.min(ends.length, DEEPEST);
  ends[row] = event.end;
  return row;
}

// The rows of the ranks that are shown, from the top down.
function arrange(step, hidden) {
  const shown = step.ranks.filter((rank) => !hidden.has(rank.rank));
  const size = DENSITIES.find((density) => shown.length <= density.upTo);
  let y = AXIS + size.between / 2;
  const rows = shown.map((rank) => {
    const top = y;
    const tracks = rank.tracks.map((track) => {
      const main = track.title === "" ? size.main : size.line;
      const nested = Math.max(0, track.ends.length - 1) * size.sub;
      const queue = track.items.some((item) => item.row < 0) ? size.queue : 0;
      const placed = { ...track, y, main, sub: size.sub, queue, height: main + nested + queue };
      y += placed.height + size.gap;
      return placed;
    });
    y += size.between - size.gap;
    return { ...rank, y: top, height: y - top - size.between, tracks };
  });
  return { rows, size, height: Math.max(AXIS + 40, y + 4) };
}

// Where an event stands in its track: its upper edge and its height.
function place(track, item) {
  if (item.row < 0) return [track.y + track.height - track.queue, track.queue];
  if (item.row === 0) return [track.y, track.main];
  return [track.y + track.main + (item.row - 0.75) * track.sub, Math.max(1, track.sub * 0.6)];
}

for (const step of steps)
  for (const rank of list(step.ranks))
    for (const bubble of list(rank.bubbles).map(prepareBubble))
      if (!causes.includes(bubble.cause)) causes.push(bubble.cause);
