// Light or dark, as the system says until the reader says otherwise; then every chart is drawn.

const redraws = [];

function themes() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = find("theme");
  let chosen = null;
  const apply = () => {
    root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    button.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show this page ${root.dataset.theme === "dark" ? "light" : "dark"}`);
    tones = {};
    for (const redraw of redraws) redraw();
  };
  dark.addEventListener("change", apply);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  button.hidden = false;
  apply();
}

themes();
showTimeline();
showOverTime();
showCurves();
