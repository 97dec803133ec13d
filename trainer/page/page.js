"use strict";
// One crosshair through all charts: mouse, touch and arrow keys choose a step, every legend shows its values there.
(() => {
  const element = document.getElementById("run-data");
  const data = element ? JSON.parse(element.textContent) : { steps: [], columns: {} };
  const steps = data.steps;
  const first = steps[0];
  const span = Math.max(steps[steps.length - 1] - first, 1e-9);
  const figures = [...document.querySelectorAll("figure.chart:not(.off)")];
  const label = document.getElementById("step");
  const table = document.getElementById("all-values");
  const standing = label ? label.textContent : "";
  let at = -1;

  const nearest = (value) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < value) low = middle; else high = middle;
    }
    return value - steps[low] < steps[high] - value ? low : high;
  };

  // An evaluation stands until the next one; other values are those of the step itself.
  const valueAt = (key, index) => {
    const column = data.columns[key];
    if (!column) return "";
    let i = index;
    if (key.startsWith("eval/")) while (i >= 0 && column[i] === null) i -= 1;
    const value = i < 0 ? null : column[i];
    if (value === null || value === undefined) return "-";
    const shown = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(value);
    return i === index ? shown : `${shown} (at ${steps[i]})`;
  };

  const fillTable = (index) => {
    if (!table || !table.closest("details").open) return;
    const rows = Object.keys(data.columns).map((key) => {
      const row = document.createElement("tr");
      const name = document.createElement("td");
      const value = document.createElement("td");
      name.textContent = key;
      value.textContent = valueAt(key, index);
      value.className = "n";
      row.append(name, value);
      return row;
    });
    table.replaceChildren(...rows);
  };

  const show = (index) => {
    if (index === at || index < 0 || index >= steps.length) return;
    at = index;
    const left = `${(100 * (steps[index] - first)) / span}%`;
    for (const figure of figures) {
      const cross = figure.querySelector(".cross");
      cross.hidden = false;
      cross.style.left = left;
      for (const output of figure.querySelectorAll("output")) output.textContent = valueAt(output.dataset.key, index);
    }
    if (label) label.textContent = `${data.axis || "step"} ${steps[index]}`;
    fillTable(index);
  };

  const hide = () => {
    at = -1;
    for (const figure of figures) {
      figure.querySelector(".cross").hidden = true;
      for (const output of figure.querySelectorAll("output")) output.textContent = "";
    }
    if (label) label.textContent = standing;
  };

  for (const figure of figures) {
    const area = figure.querySelector(".area");
    const follow = (event) => {
      const box = area.getBoundingClientRect();
      show(nearest(first + (span * (event.clientX - box.left)) / box.width));
    };
    area.addEventListener("pointermove", follow);
    area.addEventListener("pointerdown", follow);
    area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    figure.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (move === undefined) return;
      event.preventDefault();
      const from = at < 0 ? (move < 0 ? steps.length : -1) : at;
      show(Math.min(Math.max(from + move, 0), steps.length - 1));
    });
  }
  if (table) table.closest("details").addEventListener("toggle", () => fillTable(at < 0 ? steps.length - 1 : at));

  const theme = document.getElementById("theme");
  if (theme) {
    const names = ["auto", "light", "dark"];
    theme.addEventListener("click", () => {
      const next = names[(names.indexOf(theme.dataset.now) + 1) % names.length];
      theme.dataset.now = next;
      theme.textContent = `theme: ${next}`;
      if (next === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
    });
  }
})();
