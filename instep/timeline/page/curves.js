// The charts over the steps of the run: parts of the steps, loss, time per step, throughput, what was logged.

function showOverTime() {
  const over = story.over_time ?? {};
  const host = find("over-time");
  if (!host) return;
  const choice = find("over-rank");
  const ranks = list(over.ranks);
  if (ranks.length > 1) choice.append(element("option", { value: "mean" }, "mean of all"));
  for (const row of ranks) choice.append(element("option", { value: row.rank }, row.rank));
  const show = () => {
    const chosen = ranks.filter((row) => choice.value === "mean" || String(row.rank) === choice.value);
    host.dataset.rank = choice.value;
    chart(host, {
      title: "Parts of each step", height: 260, steps: over.steps, stacked: true, zero: true, unit: "ms",
      series: list(story.breakdown?.parts ?? Object.keys(ranks[0]?.parts ?? {})).map((name) => ({
        name, tone: name, values: meanOf(chosen.map((row) => list(row.parts?.[name])), over.steps.length),
      })),
    });
  };
  choice.addEventListener("change", show);
  redraws.push(show);
  show();
}

// Of each step over the rows that have a figure for it.
function meanOf(rows, length) {
  return Array.from({ length }, (_, i) => {
    const values = rows.map((row) => row[i]).filter(isNumber);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  });
}

function showCurves() {
  const curves = story.curves ?? {};
  if (!find("loss")) return;
  const steps = curves.steps;
  const held = list(curves.held_out);
  const show = () => {
    const one = (id, title, values, more) => {
      if (!list(values).some(isNumber)) find(id).hidden = true;
      else chart(find(id), { title, height: 190, steps, series: [{ name: title, values, tone: "compute" }], ...more });
    };
    one("loss", held.length ? "Loss (dots: held out)" : "Loss", curves.loss, { dots: held });
    one("step-ms", "Time per step", curves.step_ms, { zero: true, unit: "ms" });
    const rate = Object.keys(curves).find((name) => name.endsWith("_per_s")) ?? "";
    one("throughput", `${rate[0]?.toUpperCase()}${rate.slice(1).replace("_per_s", "")} per second`, curves[rate], { zero: true });
    for (const [name, points] of Object.entries(curves.figures ?? {})) {
      const id = `figure-${name}`;
      if (!find(id)) find("figures").append(element("div", { id }));
      chart(find(id), {
        title: name, height: 190, steps: points.map((point) => point[0]),
        series: [{ name, values: points.map((point) => point[1]), tone: "compute" }],
      });
    }
  };
  redraws.push(show);
  show();
}
