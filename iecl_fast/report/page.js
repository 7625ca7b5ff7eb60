"use strict";
// Curves: read values under the pointer, draw across a panel to look closer. Legends: show and hide, bring out a class.
// Without this script the page shows the same things, all of them at once.

const SVG = document.querySelector("svg")?.namespaceURI; // asked for, so that the page holds no address at all
const panels = [...document.querySelectorAll(".panel")].map(readPanel);
const resetButton = document.getElementById("reset");

function readPanel(figure) {
  const curve = figure.querySelector(".curve");
  const plot = curve.querySelector(".plot");
  const frame = ["x", "y", "width", "height"].map((name) => Number(plot.getAttribute(name)));
  const panel = { figure, curve, plot, frame, ticks: curve.querySelector(".ticks") };
  panel.xAll = curve.dataset.x.split(" ").map(Number);
  panel.yAll = curve.dataset.y.split(" ").map(Number);
  panel.x = panel.xAll;
  panel.y = panel.yAll;
  const unit = plot.viewBox.baseVal.width;
  panel.series = [...plot.querySelectorAll(".series")].map((group) => ({
    group,
    name: group.dataset.name,
    lines: [...group.querySelectorAll("polyline")].map((line) => ({
      bold: line.classList.contains("bold"),
      points: [...line.points].map((point) => ({
        x: panel.xAll[0] + (point.x / unit) * (panel.xAll[1] - panel.xAll[0]),
        y: panel.yAll[1] - (point.y / unit) * (panel.yAll[1] - panel.yAll[0]),
      })),
    })),
  }));
  panel.unit = unit;
  listen(panel);
  return panel;
}

function make(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Round numbers between two limits, 1, 2 or 5 times a power of ten apart.
function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  const found = [];
  for (let place = Math.ceil(low / step); place <= Math.floor(high / step); place++) found.push(place * step);
  return found;
}

function words(value) {
  return String(Number(value.toPrecision(6)));
}

function draw(panel) {
  const [left, top, width, height] = panel.frame;
  const across = panel.xAll[1] - panel.xAll[0];
  const up = panel.yAll[1] - panel.yAll[0];
  const box = [
    ((panel.x[0] - panel.xAll[0]) / across) * panel.unit,
    ((panel.yAll[1] - panel.y[1]) / up) * panel.unit,
    ((panel.x[1] - panel.x[0]) / across) * panel.unit,
    ((panel.y[1] - panel.y[0]) / up) * panel.unit,
  ];
  panel.plot.setAttribute("viewBox", box.join(" "));
  panel.ticks.replaceChildren();
  for (const value of ticks(...panel.y, 5)) {
    const y = top + ((panel.y[1] - value) / (panel.y[1] - panel.y[0])) * height;
    panel.ticks.append(make("line", { x1: left, x2: left + width, y1: y, y2: y }));
    panel.ticks.append(make("text", { x: left - 6, y, dy: "0.32em", "text-anchor": "end" }, words(value)));
  }
  for (const value of ticks(...panel.x, 6)) {
    const x = left + ((value - panel.x[0]) / (panel.x[1] - panel.x[0])) * width;
    panel.ticks.append(make("text", { x, y: top + height + 17, "text-anchor": "middle" }, words(value)));
  }
}

// The values of a curve between two steps, and at them.
function valuesBetween(points, low, high) {
  const values = points.filter((point) => point.x >= low && point.x <= high).map((point) => point.y);
  for (let place = 1; place < points.length; place++) {
    const [one, two] = [points[place - 1], points[place]];
    for (const edge of [low, high]) {
      if (one.x < edge && edge < two.x) values.push(one.y + ((edge - one.x) / (two.x - one.x)) * (two.y - one.y));
    }
  }
  return values;
}

// Show the steps between two, in all panels; the values between the lowest and the highest there.
function zoom(range) {
  for (const panel of panels) {
    if (range === null) {
      panel.x = panel.xAll;
      panel.y = panel.yAll;
    } else {
      const low = Math.max(range[0], panel.xAll[0]);
      const high = Math.min(range[1], panel.xAll[1]);
      if (high <= low) continue;
      const seen = panel.series
        .filter((series) => !series.group.hasAttribute("hidden"))
        .flatMap((series) => series.lines.flatMap((line) => valuesBetween(line.points, low, high)));
      panel.x = [low, high];
      const ends = seen.length ? [Math.min(...seen), Math.max(...seen)] : panel.yAll;
      const room = 0.05 * (ends[1] - ends[0]) || 0.1 * Math.abs(ends[0]) || 1;
      panel.y = [ends[0] - room, ends[1] + room];
    }
    draw(panel);
  }
  resetButton.hidden = range === null;
}

function listen(panel) {
  let start = null;
  let band = null;
  const [left, top, width, height] = panel.frame;
  const place = (event) => {
    const box = panel.curve.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * panel.curve.viewBox.baseVal.width;
    return Math.min(Math.max(x, left), left + width);
  };
  const step = (x) => panel.x[0] + ((x - left) / width) * (panel.x[1] - panel.x[0]);

  panel.curve.addEventListener("pointerdown", (event) => {
    start = place(event);
    panel.curve.setPointerCapture(event.pointerId);
  });
  panel.curve.addEventListener("pointermove", (event) => {
    const x = place(event);
    read(panel, x, step(x));
    if (start === null) return;
    if (band === null) {
      band = make("rect", { class: "chosen", y: top, height });
      panel.curve.append(band);
    }
    band.setAttribute("x", Math.min(start, x));
    band.setAttribute("width", Math.abs(x - start));
  });
  const stop = (event) => {
    if (band !== null) band.remove();
    const x = place(event);
    if (event.type === "pointerup" && start !== null && Math.abs(x - start) > 6) {
      zoom([step(Math.min(start, x)), step(Math.max(start, x))]);
    }
    start = band = null;
  };
  panel.curve.addEventListener("pointerup", stop);
  panel.curve.addEventListener("pointercancel", stop);
  panel.curve.addEventListener("pointerleave", () => unread(panel));
  panel.curve.addEventListener("dblclick", () => zoom(null));
}

// The values of all shown runs at the step that is nearest to the pointer.
function read(panel, x, step) {
  unread(panel);
  const [, top, , height] = panel.frame;
  const box = document.createElement("div");
  box.className = "readout";
  let nearestStep = null;
  const rows = [];
  for (const series of panel.series) {
    const bold = series.lines.find((line) => line.bold);
    if (series.group.hasAttribute("hidden") || !bold.points.length) continue;
    const near = bold.points.reduce((a, b) => (Math.abs(b.x - step) < Math.abs(a.x - step) ? b : a));
    nearestStep = nearestStep ?? near.x;
    const row = document.createElement("div");
    const spot = document.createElement("span");
    spot.className = "swatch";
    spot.style.setProperty("--c", series.group.style.getPropertyValue("--c"));
    row.append(spot, `${series.name} ${Number(near.y.toPrecision(4))}`);
    rows.push(row);
  }
  if (nearestStep === null) return;
  const head = document.createElement("div");
  head.textContent = `step ${Math.round(nearestStep)}`;
  box.append(head, ...rows);
  const whole = panel.curve.viewBox.baseVal.width;
  box.style[x < whole / 2 ? "right" : "left"] = "0.9rem";
  panel.figure.append(box);
  panel.curve.append(make("line", { class: "cursor", x1: x, x2: x, y1: top, y2: top + height }));
}

function unread(panel) {
  panel.figure.querySelector(".readout")?.remove();
  panel.curve.querySelector(".cursor")?.remove();
}

for (const button of document.querySelectorAll(".runs-legend [data-series]")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    for (const group of document.querySelectorAll(`.series[data-series="${button.dataset.series}"]`)) {
      group.toggleAttribute("hidden", shown);
    }
  });
}
resetButton?.addEventListener("click", () => zoom(null));

for (const figure of document.querySelectorAll(".scatter")) {
  const buttons = [...figure.querySelectorAll("button")];
  const bringOut = () => {
    const chosen = buttons.filter((button) => button.getAttribute("aria-pressed") === "true");
    const kept = chosen.map((button) => button.dataset.class);
    for (const group of figure.querySelectorAll("g.class")) {
      group.classList.toggle("faded", kept.length > 0 && !kept.includes(group.dataset.class));
    }
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      bringOut();
    });
  }
}
