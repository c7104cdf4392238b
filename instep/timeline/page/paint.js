// The timeline on a canvas: what lies outside the window or within a pixel that is painted already is left out.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const MOTIFS = ["falling", "upright", "flat", "cross", "grid"];
const DARK_TEXT = new Set(["forward", "waiting for a slower rank", "waiting for data", "agree"]);
const SHORT = { "pipeline fill": "fill", "pipeline steady state": "waits", "pipeline drain": "drain" };
const PHASES = { "pipeline fill": "rising", "pipeline steady state": "upright", "pipeline drain": "falling" };
let hatches = new Map();

// scene: {width, gutter, from, to, rows, size, height, focused (rank), picked (item), pointer ({x} or null)}
function paint(canvas, scene) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(scene.width * ratio), Math.round(scene.height * ratio)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  canvas.style.height = `${scene.height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = tone("paper");
  pen.fillRect(0, 0, scene.width, scene.height);
  const x = (us) => scene.gutter + ((us - scene.from) / (scene.to - scene.from)) * (scene.width - scene.gutter);
  paintGrid(pen, scene, x);
  pen.save();
  pen.beginPath();
  pen.rect(scene.gutter, AXIS, scene.width - scene.gutter, scene.height - AXIS);
  pen.clip();
  let painted = 0;
  for (const row of scene.rows) painted += paintRow(pen, scene, x, row);
  pen.restore();
  paintNames(pen, scene);
  return painted;
}

function paintGrid(pen, scene, x) {
  const across = scene.width - scene.gutter;
  const most = across / (scene.gutter > 50 ? 90 : 60);
  const every = niceStep((scene.to - scene.from) / 1000, most);
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (const at of marks(scene.from / 1000, scene.to / 1000, most)) {
    const left = x(at * 1000);
    if (left < scene.gutter - 0.5 || left > scene.width - 14) continue;
    pen.fillStyle = tone("line");
    pen.fillRect(Math.round(left), AXIS - 6, 1, scene.height - AXIS);
    pen.fillStyle = tone("muted");
    pen.fillText(`${markText(at, every)}${at === 0 ? " ms" : ""}`, Math.max(left, scene.gutter + 12), 13);
  }
  if (!scene.pointer || scene.pointer.x < scene.gutter) return;
  pen.fillStyle = tone("strong-line");
  pen.fillRect(Math.round(scene.pointer.x), AXIS - 6, 1, scene.height - AXIS);
}

function paintRow(pen, scene, x, row) {
  pen.fillStyle = tone("row");
  const left = x(row.begin_us);
  pen.fillRect(left, row.tracks[0].y, x(row.end_us) - left, row.tracks[0].main);
  let painted = 0;
  for (const track of row.tracks) {
    const reached = new Map(); // per row and layer, the last pixel that something narrow was painted in
    for (const item of track.items) {
      if (item.end < scene.from || item.start > scene.to) continue;
      const [start, end] = [x(item.start), Math.max(x(item.end), x(item.start) + 0.8)];
      if (end - start < 1.5) {
        const place = item.row * 8 + (item.layer ?? 0);
        if (reached.get(place) === Math.floor(start)) continue;
        reached.set(place, Math.floor(start));
      }
      paintItem(pen, scene, track, item, start, end);
      painted += 1;
    }
  }
  for (const bubble of row.bubbles) {
    if (bubble.end < scene.from || bubble.start > scene.to) continue;
    paintBubble(pen, scene, row.tracks[0], bubble, x(bubble.start), Math.max(x(bubble.end), x(bubble.start) + 0.8));
    painted += 1;
  }
  if (scene.picked?.rank === row.rank) paintPicked(pen, row, scene.picked, x);
  return painted;
}

function paintItem(pen, scene, track, item, start, end) {
  const [y, height] = place(track, item);
  pen.fillStyle = tone(item.tone);
  if (item.tone === "queued") {
    pen.fillRect(start, y + height / 2 - 0.5, end - start, 1);
    pen.fillRect(start, y, 1.5, height);
    return;
  }
  const seam = end - start > 4 ? 1 : 0; // between neighbours of one colour
  pen.fillRect(start, y, end - start - seam, height);
  const [from, to] = [Math.max(start, scene.gutter), Math.min(end, scene.width)];
  if (height < 13 || to - from < (item.stage >= 0 ? 17 : 24) || item.tone === "wait") return;
  const of = item.lane === "communication" && item.bucket >= 0;
  const ofStage = item.stage >= 0 && item.leaf >= 0;
  const text = of ? `${to - from > 62 ? "bucket " : ""}${item.bucket}`
    : ofStage ? `${to - from > 110 ? `${item.name} ` : ""}${item.leaf}` : item.name;
  write(pen, text, from, to, y + height / 2, tone(DARK_TEXT.has(item.tone) ? "on-light" : "on-dark"));
}

// As much of the text as there is room for.
function write(pen, text, from, to, middle, colour) {
  const room = Math.floor((to - from - 11) / 5.9);
  if (room < Math.min(3, text.length)) return;
  const cut = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  pen.font = `11px ${FONT}`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(cut, from + 5, middle + 0.5);
}

function paintBubble(pen, scene, track, bubble, start, end) {
  pen.fillStyle = tone("wait");
  pen.fillRect(start, track.y, end - start, track.main);
  pen.fillStyle = hatch(pen, bubble);
  pen.fillRect(start, track.y, end - start, track.main);
  const [from, to] = [Math.max(start, scene.gutter), Math.min(end, scene.width)];
  if (track.main < 14 || to - from < 30 || !(bubble.slowness || isPhase(bubble.cause))) return;
  const text = bubble.slowness ? `waits for rank ${bubble.peer}` : SHORT[bubble.cause] ?? bubble.cause;
  pen.font = `600 11px ${FONT}`;
  const width = pen.measureText(text).width;
  if (width + 16 > to - from) return;
  const left = (from + to - width) / 2;
  pen.fillStyle = tone("paper");
  pen.fillRect(left - 5, track.y + 4, width + 10, track.main - 8);
  pen.fillStyle = tone("ink");
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(text, left, track.y + track.main / 2 + 0.5);
}

function paintPicked(pen, row, item, x) {
  const track = row.tracks.find((one) => one.items.includes(item));
  if (!track) return;
  const [y, height] = place(track, item);
  pen.strokeStyle = tone("ink");
  pen.lineWidth = 2;
  pen.strokeRect(x(item.start) - 1, y - 1, Math.max(2, x(item.end) - x(item.start)) + 2, height + 2);
}

function paintNames(pen, scene) {
  const wide = scene.gutter > 50;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = `11px ${FONT}`;
  pen.fillStyle = tone("muted");
  if (!wide) pen.fillText("rank", 6, 13);
  for (const row of scene.rows) {
    const track = row.tracks[0];
    const slow = row.rank === story.slow?.rank;
    pen.font = `${row.rank === scene.focused || slow ? "700" : "500"} ${clamp(row.height - 1, 8, 13)}px ${FONT}`;
    pen.fillStyle = tone("ink");
    pen.fillText(wide ? `rank ${row.rank}` : `${row.rank}`, 10, track.y + track.main / 2);
    if (slow) mark(pen, "waiting for a slower rank", row);
    else if (row.rank === scene.focused) mark(pen, "accent", row);
    if (!wide || scene.size.line < 12) continue;
    pen.font = `11px ${FONT}`;
    pen.fillStyle = tone("muted");
    for (const one of row.tracks.slice(1))
      pen.fillText(one.title === "communication" ? "messages" : one.title.slice(0, 11), 10, one.y + one.main / 2);
  }
}

function mark(pen, name, row) {
  pen.fillStyle = tone(name);
  pen.fillRect(0, row.y, 4, row.height);
}

// The colour says whether a rank or messages are waited for, the lines say what for.
function hatch(pen, bubble) {
  const motif = bubble.slowness ? "rising" : MOTIFS[causes.indexOf(bubble.cause) % MOTIFS.length];
  const shape = PHASES[bubble.cause] ?? motif;
  const part = isPhase(bubble.cause) ? "pipeline bubble" : "exposed communication";
  const colour = tone(bubble.slowness ? "waiting for a slower rank" : part);
  const key = `${shape} ${colour}`;
  if (!hatches.has(key)) hatches.set(key, pen.createPattern(tile(shape, colour), "repeat"));
  const pattern = hatches.get(key);
  pattern.setTransform(new DOMMatrix().scale(0.25));
  return pattern;
}

function tile(motif, colour) {
  const made = element("canvas", { width: 32, height: 32 });
  const pen = made.getContext("2d");
  pen.globalAlpha = 0.25;
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 32, 32);
  pen.globalAlpha = 1;
  pen.strokeStyle = colour;
  pen.lineWidth = 8;
  const strokes = {
    rising: [[-8, 40, 40, -8], [-8, 8, 8, -8], [24, 40, 40, 24]],
    falling: [[-8, -8, 40, 40], [-8, 24, 8, 40], [24, -8, 40, 8]],
    upright: [[16, 0, 16, 32]],
    flat: [[0, 16, 32, 16]],
    cross: [[-8, 40, 40, -8], [-8, -8, 40, 40]],
    grid: [[16, 0, 16, 32], [0, 16, 32, 16]],
  };
  for (const [x, y, right, low] of strokes[motif]) {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(right, low);
    pen.stroke();
  }
  return made;
}
