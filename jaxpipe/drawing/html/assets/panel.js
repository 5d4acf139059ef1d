// One panel of the page: its head, its legend and its two canvases.

const MARGIN = 200; // pixels around the screen that are drawn too
let colours = {};

function readColours() {
  colours = {
    ink: colour("ink"), softInk: colour("soft-ink"), track: colour("track"), store: colour("store"),
    path: colour("path"), halo: colour("halo"),
  };
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function addPanel(panel) {
  panel.styles.forEach((style) => (style.rgb = rgbOf(style.fill)));
  panel.busy = busyOf(panel);
  panel.peaks = peaksOf(panel);
  panel.canvas = element("canvas", { "data-layer": "tracks", "aria-hidden": "true" });
  panel.overlay = element("canvas", { class: "overlay", "aria-hidden": "true" });
  const ratio = (100 * panel.bubbleRatio).toFixed(2);
  const most = Math.max(...panel.peaks), bytes = gib(panel, most);
  const peak = `${number(most)} Ma${bytes && ` (${bytes})`}`;
  const told =
    `${panel.clock} clock: makespan ${number(panel.makespan)}, bubble ratio ${ratio} %, at most ${peak} stored`;
  panel.stack = element("div", { class: "stack" }, panel.canvas, panel.overlay);
  panel.section = element(
    "section",
    {
      class: "panel",
      tabindex: "0",
      "aria-label": `timeline of ${panel.schedule}, ${told}`,
      "data-clock": panel.clock,
    },
    element("h2", {}, `${panel.schedule} `, element("small", {}, told)),
    panel.stack,
    legendOf(panel),
  );
  document.getElementById("panels").append(panel.section);
}

function legendOf(panel) {
  const key = (fill, label) => element("span", {}, element("i", { style: `background:${fill}` }), label);
  const keys = panel.styles.map((style) => key(style.fill, style.label));
  const parts = panel.stored.filter(({ values }) => values.some((value) => value > 0));
  const memory = parts.map(({ fill, label }) => key(fill, `stored: ${label}`));
  if (panel.bound !== null) {
    memory.push(element("span", {}, element("i", { class: "line" }), `bound, ${number(panel.bound)} Ma`));
  }
  const rounds = panel.round ? [element("span", {}, "notches: rounds begin")] : [];
  return element("p", { class: "keys" }, ...keys, ...memory, ...rounds);
}

// Draws what is on the screen, and a little more.
function paintPanel(panel) {
  const context = sized(panel.canvas, view.width, panel.layout.height);
  const { top, left } = panel.canvas.getBoundingClientRect();
  for (let device = 0; device < panel.numDevices; device++) {
    const track = panel.layout.tracks[device];
    if (top + track.bottom < -MARGIN || top + track.top > innerHeight + MARGIN) continue;
    paintStored(context, panel, device);
    paintTrack(context, panel, device);
    paintNames(context, panel, device);
  }
  paintOverlay(panel);
  panel.canvas.dataset.from = view.from;
  panel.canvas.dataset.to = view.to;
  panel.canvas.dataset.plot = JSON.stringify([LEFT, plotWidth()]);
  panel.canvas.dataset.tracks = JSON.stringify(panel.layout.tracks);
  panel.canvas.dataset.top = top + scrollY;
  panel.canvas.dataset.left = left + scrollX;
}
