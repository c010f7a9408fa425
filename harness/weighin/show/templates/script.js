"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector, root = document) => root.querySelector(selector);

// ---- Theme: the system's setting, until the reader uses the button.
const theme = one("#theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
systemIsDark.addEventListener("change", nameTheme);
nameTheme();

// ---- Sort a table by the column whose heading is clicked. Rows without a figure come last.
const sortBy = (head) => {
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of all("th", head.parentNode)) other.ariaSort = "none";
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  const body = one("tbody", head.closest("table"));
  const rows = [...body.rows].map((row) => ({ row, cell: row.cells[head.cellIndex] }));
  const text = (cell) => cell.textContent.trim();
  const compare = (a, b) => ("key" in a.dataset && "key" in b.dataset
    ? Number(a.dataset.key) - Number(b.dataset.key)
    : text(a).localeCompare(text(b), "en", { numeric: true }));
  const lacks = (cell) => text(cell) === "-" && !("key" in cell.dataset);
  rows.sort((a, b) => lacks(a.cell) - lacks(b.cell) || sign * compare(a.cell, b.cell));
  body.append(...rows.map((entry) => entry.row));
};
for (const head of all("thead th")) {
  head.tabIndex = 0;
  head.title = "sort";
  head.addEventListener("click", () => sortBy(head));
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sortBy(head); });
}

// ---- Show only the rows with all words of the filter.
const form = one("#filter");
const applyFilter = () => {
  const words = one("#words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = all("tbody tr");
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  one("#shown").textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
};
form.hidden = false;
form.addEventListener("input", applyFilter);
form.addEventListener("submit", (event) => event.preventDefault());
applyFilter();  // after "back", browsers restore the inputs of a form

// ---- Each row has a link, which shows when the mouse is on the row.
for (const row of all("tbody tr")) {
  const name = row.cells[0].textContent;
  const section = row.closest("section").ariaLabel;
  row.id = `${section} ${name}`.toLowerCase().replaceAll(/[^a-z0-9_]+/g, "-");
  for (let copy = 2; all(`[id="${row.id}"]`).length > 1; copy += 1) row.id = row.id.replace(/(--\d+)?$/, `--${copy}`);
  const link = Object.assign(document.createElement("a"), { className: "row", href: `#${row.id}`, ariaLabel: "link to this row" });
  row.cells[0].append(link);
}
const showLinked = () => {
  for (const row of all("tr.linked")) row.classList.remove("linked");
  const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (row?.tagName !== "TR") return;
  row.classList.add("linked");
  row.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", showLinked);
showLinked();

// ---- Say where a table or picture is wider than the window.
const markWide = () => { for (const box of all(".scroll")) box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1); };
addEventListener("resize", markWide);
markWide();

// ---- Drag over a picture with the mouse to zoom into it; a double click shows all of it again.
for (const figure of all(".picture")) {
  const svg = one("svg", figure);
  const whole = svg.getAttribute("viewBox");
  let from = null;
  figure.classList.add("zooms");
  figure.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? event : null; });
  figure.addEventListener("pointerup", (event) => {
    const wide = from && Math.abs(event.clientX - from.clientX);
    if (!wide || wide < 12) return;
    const [x, y, width, height] = svg.getAttribute("viewBox").split(/\s+/).map(Number);
    const box = svg.getBoundingClientRect();
    const share = wide / box.width;
    const left = (Math.min(event.clientX, from.clientX) - box.left) / box.width;
    const middle = ((event.clientY + from.clientY) / 2 - box.top) / box.height;
    const top = Math.max(0, Math.min(1 - share, middle - share / 2));
    svg.setAttribute("viewBox", [x + left * width, y + top * height, share * width, share * height].join(" "));
  });
  figure.addEventListener("dblclick", () => svg.setAttribute("viewBox", whole));
}

// ---- Show the tip of the mark or field under the mouse.
const tip = one("#tip");
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip.replaceAll(" · ", "\n");
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${event.clientY + 18 + height < innerHeight ? event.clientY + 18 : Math.max(4, event.clientY - height - 12)}px`;
});
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
