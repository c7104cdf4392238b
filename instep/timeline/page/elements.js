// The story, and what makes elements and words; text of the story only ever becomes text nodes.

const story = JSON.parse(document.getElementById("story").textContent);
const find = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// An array, whatever the story has in its place.
const list = (value) => (Array.isArray(value) ? value : []);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const slug = (name) => String(name).replaceAll(" ", "-");
const clamp = (value, low, high) => Math.max(low, Math.min(value, high));

let tones = {};
function tone(name) {
  tones[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${slug(name)}`).trim();
  return tones[name] || (name === "unattributed" ? "#999999" : tone("unattributed"));
}

// Three figures or so.
function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

const milliseconds = (us) => `${figure(us / 1000)} ms`;

function size(bytes) {
  const [unit, by] = bytes >= 1e6 ? ["MB", 1e6] : bytes >= 1e3 ? ["kB", 1e3] : ["B", 1];
  return `${figure(bytes / by)} ${unit}`;
}

// 1, 2 or 5 times a power of ten, so that `most` of them suffice.
function niceStep(range, most) {
  const least = range / most || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.999);
}

function marks(low, high, most) {
  const step = niceStep(high - low, most);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

// A mark of an axis, with as many digits as the marks' distance asks for.
function markText(value, step) {
  const digits = clamp(Math.ceil(-Math.log10(step) - 1e-9), 0, 6);
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
