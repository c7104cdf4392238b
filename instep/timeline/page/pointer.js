// The timeline under the pointer: drag and pinch, wheel, what an event says.

function pointers(one) {
  const { canvas, view } = one;
  const held = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, inside(canvas, event));
    if (held.size === 1) moved = 0;
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = inside(canvas, event);
    const before = held.get(event.pointerId);
    if (!before) return hover(one, now);
    held.set(event.pointerId, now);
    moved += Math.abs(now.x - before.x) + (held.size > 1 ? Math.abs(now.y - before.y) : 0);
    if (held.size === 1) pan(one, timeAt(one, before.x) - timeAt(one, now.x));
    else pinch(one, [...held].find(([id]) => id !== event.pointerId)[1], before, now);
    if (moved > 3) hideTip();
  });
  const release = (event) => {
    const at = held.get(event.pointerId);
    held.delete(event.pointerId);
    if (!held.size) canvas.classList.remove("held");
    if (event.type === "pointerup" && at && moved <= 3) pick(one, at);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    view.pointer = null;
    if (!view.picked) hideTip();
    draw(one);
  });
  canvas.addEventListener("dblclick", (event) => {
    const { item, bubble } = hit(one, inside(canvas, event));
    const target = item ?? bubble;
    if (!target) return;
    const room = (target.end - target.start) * 0.1;
    show(one, target.start - room, target.end + room);
  });
}

function inside(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left - canvas.clientLeft, y: event.clientY - box.top - canvas.clientTop };
}

// The page scrolls by the wheel until the timeline has been clicked: nobody gets stuck on it.
function wheel(one) {
  one.canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== one.canvas) return;
    event.preventDefault();
    const by = event.deltaMode === 1 ? 16 : 1;
    if (sideways) return pan(one, (event.deltaX * by * span(one)) / one.view.scene.width);
    const factor = Math.exp(clamp(event.deltaY * by, -150, 150) / (event.ctrlKey ? 120 : 400));
    zoom(one, factor, timeAt(one, inside(one.canvas, event).x));
  }, { passive: false });
}

function pinch(one, other, before, now) {
  const apart = (a, b) => Math.max(20, Math.hypot(a.x - b.x, a.y - b.y));
  const middle = (a, b) => timeAt(one, (a.x + b.x) / 2);
  pan(one, middle(other, before) - middle(other, now));
  zoom(one, apart(other, before) / apart(other, now), middle(other, now));
}

function hit(one, { x, y }) {
  const { scene } = one.view;
  const row = scene.rows.find((each) => y >= each.y - 2 && y <= each.y + each.height + 2);
  if (!row || x < scene.gutter) return { row };
  const [time, near] = [timeAt(one, x), (3 * span(one)) / (scene.width - scene.gutter)];
  const bubble = y <= row.tracks[0].y + row.tracks[0].main
    ? row.bubbles.find((each) => each.start <= time && each.end >= time) : undefined;
  let best;
  for (const track of row.tracks)
    for (const item of track.items) {
      const [top, height] = place(track, item);
      if (y < top || y > top + height || item.start - near > time || item.end + near < time) continue;
      if (!best || distance(item, time) <= distance(best, time)) best = item;
    }
  return { row, item: best, bubble };
}

const distance = (item, time) => Math.max(0, item.start - time, time - item.end);

function hover(one, at) {
  one.view.pointer = at;
  const { item, bubble } = hit(one, at);
  if (item || bubble) showTip(one, item, bubble ? [bubble] : [], at.x, at.y);
  else if (!one.view.picked) hideTip();
  draw(one);
}

function pick(one, at) {
  const { row, item, bubble } = hit(one, at);
  one.view.picked = item ?? null;
  if (row) one.view.focused = row.rank;
  if (item || bubble) showTip(one, item, bubble ? [bubble] : [], at.x, at.y);
  else hideTip();
  draw(one);
}

function hideTip() {
  find("tip").hidden = true;
}

function showTip(one, item, bubbles, x, y) {
  const tip = find("tip");
  const said = (text) => element("span", {}, text);
  const why = (bubble) => (bubble.slowness ? `for rank ${bubble.peer}, which was not ready`
    : bubble.peer >= 0 ? `for rank ${bubble.peer}` : "while messages travelled");
  const waited = bubbles.map((bubble) =>
    said(`${milliseconds(bubble.end - bubble.start)} ${why(bubble)} (${bubble.cause})`));
  const name = element("b", {}, item ? item.name : "waits");
  tip.replaceChildren(name, ...(item ? details(item).map(said) : []), ...waited);
  tip.hidden = false;
  const room = find("picture").clientWidth;
  const beside = x + 14 + tip.offsetWidth > room ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${clamp(beside, 0, Math.max(0, room - tip.offsetWidth))}px`;
  tip.style.top = `${y + 14}px`;
}

function details(item) {
  const parts = [];
  if (item.bytes > 0) parts.push(size(item.bytes));
  if (item.bucket >= 0) parts.push(`bucket ${item.bucket}`);
  if (item.stage >= 0) parts.push(`stage ${item.stage}`);
  if (item.leaf >= 0) parts.push(`micro-batch ${item.leaf}`);
  if (item.peer >= 0) parts.push(`for rank ${item.peer}`);
  return [`${milliseconds(item.end - item.start)}, from ${milliseconds(item.start)}`,
    `rank ${item.rank}, ${item.lane}`, ...(parts.length ? [parts.join(", ")] : [])];
}
