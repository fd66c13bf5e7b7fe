"use strict";
const PRINTED_PIXELS = 680;  // width of A4 and of letter paper without margins
const LEGEND_ROW_PIXELS = 24;
const narrow = matchMedia("(max-width: 640px)").matches;
const touched = matchMedia("(pointer: coarse)").matches;
const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: narrow || touched ? false : "hover",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
};
const plots = Object.keys(figures).map((name) => document.getElementById(name));

// What is under the pointer: plotly's own labels are cut off where they are higher than their figure.
const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; };
const show = ({ points, event }) => {
  const [title, ...lines] = (points[0].hovertext || "").split("\n");
  if (!title) return hide();
  tip.replaceChildren(document.createElement("b"), ...lines.map(() => document.createElement("div")));
  [title, ...lines].forEach((line, i) => { tip.children[i].textContent = line; });
  tip.hidden = false;
  const { clientX: x, clientY: y } = event.changedTouches ? event.changedTouches[0] : event;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const below = y + 18 + height <= innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, below ? y + 18 : y - height - 14)}px`;
};
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

for (const plot of plots) {
  const { data, layout } = figures[plot.id];
  if (narrow) {
    layout.height += LEGEND_ROW_PIXELS * Math.floor(data.length / 2);
    plot.style.height = `${layout.height}px`;
  }
  if (narrow || touched) layout.dragmode = false;  // a finger on a figure scrolls the page
  Plotly.newPlot(plot, data, layout, config);
  plot.on("plotly_hover", show);
  plot.on("plotly_click", show);  // a tap
  plot.on("plotly_unhover", hide);
}

const closed = () => document.querySelectorAll("details:not([open])");
let opened = [];
addEventListener("beforeprint", () => {
  hide();
  opened = [...closed()];
  for (const details of opened) details.open = true;
  for (const plot of plots) Plotly.relayout(plot, { width: PRINTED_PIXELS, autosize: false });
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
  for (const plot of plots) Plotly.relayout(plot, { width: null, autosize: true });
});
