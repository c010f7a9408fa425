"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector, root = document) => root.querySelector(selector);

// ---- Theme: the system's setting, until the reader uses the button.
const theme = one("#theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.title = "Switch between a light and a dark page";
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
systemIsDark.addEventListener("change", nameTheme);
nameTheme();

// ---- Sort the table. Rows without a figure come last in both directions.
const compare = (isNumber, sign) => (a, b) => {
  if (a.key === "" || b.key === "") return (a.key === "") - (b.key === "") || a.place - b.place;
  const order = isNumber ? Number(a.key) - Number(b.key) : a.key.localeCompare(b.key, "en", { numeric: true });
  return sign * order || a.place - b.place;
};

const sortBy = (button) => {
  const head = button.closest("th");
  const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of all("th[aria-sort]", head.parentNode)) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", direction);
  const body = one("tbody", head.closest("table"));
  const isNumber = "number" in button.dataset || head.cellIndex === limitColumn;
  const rows = [...body.rows].map((row, place) => ({ row, place, key: row.cells[head.cellIndex].dataset.key }));
  rows.sort(compare(isNumber, direction === "ascending" ? 1 : -1));
  body.append(...rows.map((entry) => entry.row));
};
const limitColumn = all("#figures thead th").findIndex((head) => head.textContent.trim() === "RAM limit");
for (const button of all("#figures thead button")) button.addEventListener("click", () => sortBy(button));

// ---- Filter the rows, and the bars and timelines of their series.
const form = one("#filter");
const applyFilter = () => {
  const words = one("#words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const choices = all("select", form).filter((select) => select.value);
  const rows = all("#figures tbody tr");
  const shown = new Set();
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const isChosen = choices.every((select) => {
      const cell = row.cells[Number(select.dataset.column)];
      return (cell.classList.contains("outcome") ? row.dataset.outcome : cell.textContent) === select.value;
    });
    if (isChosen && words.every((word) => text.includes(word))) shown.add(row.dataset.series);
  }
  for (const drawn of all("[data-series]")) drawn.hidden = !shown.has(drawn.dataset.series);
  one("#shown").textContent = `${shown.size} of ${rows.length} rows`;
};
if (form) {
  form.hidden = false;
  form.addEventListener("input", applyFilter);
  form.addEventListener("reset", () => setTimeout(applyFilter));
  form.addEventListener("submit", (event) => event.preventDefault());
  applyFilter();  // after "back", browsers restore the inputs of a form
}

// ---- Time over peak: show one figure of memory at a time.
const over = one(".switch");
const showOver = () => {
  const chosen = one("input:checked", over).value;
  for (const figure of all("[data-over]")) figure.hidden = figure.dataset.over !== chosen;
};
if (over) {
  over.hidden = all("input", over).length < 2;
  over.addEventListener("change", showOver);
  showOver();
}

// ---- Explain a mark on hover, and with the arrow keys in a drawing that has the focus.
const tip = one("#tip");
const showTip = (text, x, y) => {
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(4, y - height - 12)}px`;
};
const hideTip = () => {
  tip.hidden = true;
  for (const mark of all(".current")) mark.classList.remove("current");
  for (const cross of all(".cross")) cross.style.visibility = "hidden";
};

const LEFT = 40, RIGHT = 452, TOP = 22, BOTTOM = 166;  // the plot area of a timeline, as in timelines.py
const pointsOf = (path) => path.getAttribute("d").slice(1).replace("Z", "").split("L").map((pair) => pair.split(",").map(Number));

// The sampled memory under the pointer, read from the drawn paths.
const sampleAt = (svg, x) => {
  const outline = one(".outline", svg);
  if (!outline) return "";
  const points = pointsOf(outline);
  let nearest = 0;
  points.forEach((point, index) => { if (Math.abs(point[0] - x) < Math.abs(points[nearest][0] - x)) nearest = index; });
  const gib = (y) => ((BOTTOM - y) / (BOTTOM - TOP)) * Number(svg.dataset.top);
  const seconds = ((points[nearest][0] - LEFT) / (RIGHT - LEFT)) * Number(svg.dataset.span);
  const anonymous = gib(pointsOf(one(".anon", svg))[nearest][1]);
  const cross = one(".cross", svg);
  cross.setAttribute("x1", points[nearest][0]);
  cross.setAttribute("x2", points[nearest][0]);
  cross.style.visibility = "visible";
  return `\nat ${seconds.toFixed(2)} s: RSS ${gib(points[nearest][1]).toFixed(2)} GiB, anonymous ${anonymous.toFixed(2)} (sampled)`;
};

document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  if (!mark) return hideTip();
  hideTip();
  const svg = mark.closest("svg.timeline");
  let text = mark.dataset.tip;
  if (svg) {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    text += sampleAt(svg, place.x);
  }
  showTip(text, event.clientX, event.clientY);
});
document.addEventListener("pointerleave", hideTip);
addEventListener("scroll", hideTip, { passive: true });

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
for (const group of all(".marks")) {
  group.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hideTip();
    const marks = all("[data-tip]", group).filter((mark) => !mark.hidden);
    const step = STEPS[event.key];
    if (!step || !marks.length || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const now = marks.findIndex((mark) => mark.classList.contains("current"));
    const next = now < 0 ? (step > 0 ? 0 : marks.length - 1) : (now + step + marks.length) % marks.length;
    hideTip();
    marks[next].classList.add("current");
    const box = marks[next].getBoundingClientRect();
    showTip(marks[next].dataset.tip, box.left + box.width / 2, box.bottom - 12);
  });
  group.addEventListener("blur", hideTip);
}
