// Curves and stacked areas over the steps, with a line that reads the figures off under the pointer or by keys.

const EDGE = { left: 46, right: 6, top: 8, bottom: 26 };

// what: {title, height, steps, series: [{name, values, tone}], dots: [[step, value]], stacked, zero, unit}
function chart(host, what) {
  const read = element("span", { class: "read", "aria-live": "polite" });
  const picture = drawn("svg", { tabindex: "0", role: "img", height: what.height, "aria-label": spoken(what) });
  host.replaceChildren(
    element("figure", { class: "curve" },
      element("p", { class: "title" }, element("span", {}, what.title, above(what)), read), picture));
  let at = -1;
  const redraw = () => {
    const scale = scaleOf(what, picture.clientWidth || host.clientWidth || 300);
    picture.replaceChildren(...axes(what, scale), ...(what.stacked ? areas : lines)(what, scale));
    if (at >= 0) picture.append(cross(scale, scale.x(what.steps[at])));
    read.textContent = at < 0 ? latest(what) : reading(what, at);
    return scale;
  };
  const move = (index) => { at = index; host.dataset.at = at < 0 ? "" : what.steps[at]; redraw(); };
  picture.addEventListener("pointermove", (event) => {
    const scale = scaleOf(what, picture.clientWidth);
    move(nearest(what.steps, scale.step(event.clientX - picture.getBoundingClientRect().left)));
  });
  picture.addEventListener("pointerleave", () => move(-1));
  picture.addEventListener("blur", () => move(-1));
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    move(clamp((at < 0 ? what.steps.length - 1 : at) + by, 0, what.steps.length - 1));
  });
  new ResizeObserver(redraw).observe(picture);
}

function scaleOf(what, width) {
  const totals = what.stacked
    ? what.steps.map((_, i) => what.series.reduce((sum, one) => sum + Math.max(0, one.values[i] ?? 0), 0))
    : [...what.series.flatMap((one) => one.values), ...list(what.dots).map((dot) => dot[1])];
  const values = totals.filter(isNumber).sort((a, b) => a - b);
  // One step that takes ten times as long, as the first does, would press all others flat.
  const usual = values[Math.floor(values.length * 0.97)] ?? 1;
  const most = values.at(-1) > 2 * usual && what.zero ? usual * 1.25 : (values.at(-1) ?? 1) * (what.zero ? 1.08 : 1);
  let low = what.zero ? 0 : (values[0] ?? 0);
  let high = most;
  if (!what.zero) [low, high] = [low - (high - low) * 0.08, high + (high - low) * 0.05];
  if (high <= low) [low, high] = [low - 0.5, low + 0.5];
  const shown = [...what.steps, ...list(what.dots).map((dot) => dot[0])];
  const [first, last] = [Math.min(...shown), Math.max(...shown)];
  const across = Math.max(10, width - EDGE.left - EDGE.right);
  const down = what.height - EDGE.top - EDGE.bottom;
  return {
    width, low, high, first, last, height: what.height, beyond: values.filter((value) => value > high).length,
    x: (step) => EDGE.left + ((step - first) / (last - first || 1)) * across,
    y: (value) => EDGE.top + (1 - (clamp(value, low, high) - low) / (high - low)) * down,
    step: (x) => first + ((x - EDGE.left) / across) * (last - first),
  };
}

function axes(what, scale) {
  const made = [];
  const heights = marks(scale.low, scale.high, 5);
  for (const value of heights) {
    const y = scale.y(value);
    made.push(drawn("line", { class: "grid", x1: EDGE.left, x2: scale.width - EDGE.right, y1: y, y2: y }),
      drawn("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" },
        markText(value, (heights[1] ?? 1) - (heights[0] ?? 0) || 1)));
  }
  for (const step of marks(scale.first, scale.last, Math.max(2, scale.width / 110)))
    if (Number.isInteger(step))
      made.push(drawn("text", { x: scale.x(step), y: scale.height - 6, "text-anchor": "middle" }, markText(step, 1)));
  return made;
}

// Where a figure is missing, a curve has a gap.
function lines(what, scale) {
  const paths = what.series.map((one) => {
    let path = "";
    let pen = "M";
    one.values.forEach((value, i) => {
      if (isNumber(value)) path += `${pen}${scale.x(what.steps[i]).toFixed(1)} ${scale.y(value).toFixed(1)}`;
      pen = isNumber(value) ? "L" : "M";
    });
    const made = drawn("path", { class: "path", d: path });
    made.style.stroke = tone(one.tone);
    return made;
  });
  const dots = list(what.dots).filter((dot) => isNumber(dot[1])).map(([step, value]) =>
    drawn("circle", { class: "dot", cx: scale.x(step), cy: scale.y(value), r: 4 }));
  return [...paths, ...dots];
}

function areas(what, scale) {
  const under = what.steps.map(() => 0);
  return what.series.map((one) => {
    const bottom = what.steps.map((step, i) => `${scale.x(step).toFixed(1)} ${scale.y(under[i]).toFixed(1)}`);
    one.values.forEach((value, i) => { under[i] += Math.max(0, value ?? 0); });
    const top = what.steps.map((step, i) => `${scale.x(step).toFixed(1)} ${scale.y(under[i]).toFixed(1)}`);
    const made = drawn("path", { d: `M${top.join("L")}L${bottom.reverse().join("L")}Z` });
    made.style.fill = tone(one.tone);
    return made;
  });
}

// How many steps are higher than the picture.
function above(what) {
  const { beyond } = scaleOf(what, 300);
  return beyond ? element("small", { class: "muted" }, ` (${beyond} ${beyond === 1 ? "step is" : "steps are"} higher)`) : "";
}

const cross = (scale, x) =>
  drawn("line", { class: "cross", x1: x, x2: x, y1: EDGE.top, y2: scale.height - EDGE.bottom });

function nearest(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
  return best;
}

const withUnit = (value, what) => `${figure(value)}${what.unit ? ` ${what.unit}` : ""}`;

function reading(what, at) {
  const parts = what.series.filter((one) => isNumber(one.values[at]) && (!what.stacked || one.values[at] > 0));
  const said = what.stacked
    ? parts.map((one) => `${one.name} ${figure(one.values[at])}`).join(", ")
    : parts.map((one) => withUnit(one.values[at], what)).join(", ");
  return `step ${what.steps[at]}: ${said || "–"}${what.stacked ? ` ${what.unit}` : ""}`;
}

function latest(what) {
  if (what.stacked) return `in ${what.unit}; point at a step to read it`;
  const values = what.series[0].values.filter(isNumber);
  return values.length ? `last ${withUnit(values.at(-1), what)}` : "";
}

function spoken(what) {
  const values = what.series[0].values.filter(isNumber);
  const range = values.length ? `${figure(values[0])} at first, ${figure(values.at(-1))} at last` : "no figures";
  return what.stacked
    ? `${what.title}: stacked parts of ${what.steps.length} steps. Arrow keys read them.`
    : `${what.title}: ${range}. Arrow keys read the steps.`;
}
