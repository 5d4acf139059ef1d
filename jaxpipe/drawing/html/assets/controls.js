// Mouse, touch, keyboard, buttons and address: each changes the view, and the page is drawn again.

const ZOOM = 1.3;
const DRAG = 4; // pixels: a press that moves further is no click

function addControls(panels) {
  const click = (id, act) => document.getElementById(id).addEventListener("click", () => (act(), changed()));
  click("zoom-in", () => zoom(1 / ZOOM));
  click("zoom-out", () => zoom(ZOOM));
  click("pan-left", () => pan(-0.25));
  click("pan-right", () => pan(0.25));
  click("fit", showAll);
  const clocks = [...new Set(panels.map((panel) => panel.clock))];
  const choice = document.getElementById("clock");
  for (const clock of clocks.length > 1 ? [...clocks, "both"] : clocks) choice.append(element("option", {}, clock));
  choice.addEventListener("change", () => chooseClock(choice.value));
  for (const name of ["memory", "path"]) {
    const box = document.getElementById(name);
    box.addEventListener("change", () => ((view[name] = box.checked), changed()));
  }
  panels.forEach(addPointer);
  panels.forEach((panel) => panel.section.addEventListener("keydown", (event) => pressed(panel, event)));
  addEventListener("resize", changed);
  addEventListener("scroll", () => requestAnimationFrame(paintVisible));
  addEventListener("hashchange", () => (readAddress(panels), changed()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

function showAll() {
  show(0, wholeOf(allPanels));
}

// Keeps the range of time of a zoomed view; a view of the whole schedule stays whole.
function chooseClock(clock) {
  const sawAll = view.from === 0 && view.to === wholeOf(allPanels);
  view.clock = clock;
  if (sawAll) showAll();
  dropHidden();
  changed();
}

function dropHidden() {
  if (view.selected && !isShown(view.selected.panel)) view.selected = null;
  view.hovered = null;
  tellNothing();
}

function addPointer(panel) {
  const { stack } = panel;
  let pressedAt = null;
  stack.addEventListener(
    "wheel",
    (event) => {
      const x = event.clientX - stack.getBoundingClientRect().left;
      if (x < LEFT) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        pan((event.deltaX || event.deltaY) / plotWidth());
      } else {
        zoom(ZOOM ** (event.deltaY / 100), timeAt(x));
      }
      changed();
    },
    { passive: false },
  );
  stack.addEventListener("pointerdown", (event) => {
    pressedAt = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, scroll: scrollY, moved: false };
    stack.setPointerCapture(event.pointerId);
  });
  stack.addEventListener("pointermove", (event) => {
    if (!pressedAt) return point(panel, event);
    const [across, down] = [event.clientX - pressedAt.x, event.clientY - pressedAt.y];
    pressedAt.moved ||= Math.hypot(across, down) > DRAG;
    if (!pressedAt.moved) return undefined;
    const step = (-across / plotWidth()) * (pressedAt.to - pressedAt.from);
    show(pressedAt.from + step, pressedAt.to + step);
    scrollTo(scrollX, pressedAt.scroll - down);
    tellNothing();
    return changed();
  });
  stack.addEventListener("pointerup", (event) => {
    if (pressedAt && !pressedAt.moved) {
      const { action } = placeOf(panel, event);
      choose(action >= 0 ? { panel, action } : null);
    }
    pressedAt = null;
  });
  stack.addEventListener("pointercancel", () => (pressedAt = null));
  stack.addEventListener("pointerleave", () => {
    view.hovered = null;
    paintOverlay(panel);
    tellSelected();
  });
}

function placeOf(panel, event) {
  const box = panel.stack.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const device = x >= LEFT && x <= LEFT + plotWidth() ? deviceAt(panel, y) : -1;
  return { device, time: timeAt(x), action: device >= 0 ? actionAt(panel, device, x, y) : -1 };
}

function point(panel, event) {
  const { device, time, action } = placeOf(panel, event);
  view.hovered = device >= 0 ? { panel, action, device, time } : null;
  paintOverlay(panel);
  if (device >= 0) tell(panel, device, action, time, event.clientX, event.clientY);
  else tellNothing();
}

function choose(selected) {
  view.selected = selected;
  changed();
}

function tellSelected() {
  if (!view.selected) return tellNothing();
  const { panel, action } = view.selected, box = boxOf(panel, action);
  const place = panel.stack.getBoundingClientRect();
  const x = Math.min(Math.max(box.left + box.width, LEFT), LEFT + plotWidth()) + place.left;
  return tell(panel, deviceOf(panel, action), action, panel.start[action], x, box.top + box.height + place.top);
}

const KEYS = {
  "+": () => zoom(1 / ZOOM),
  "=": () => zoom(1 / ZOOM),
  "-": () => zoom(ZOOM),
  ArrowLeft: () => pan(-0.1),
  ArrowRight: () => pan(0.1),
  0: showAll,
  Home: showAll,
  n: (panel) => walk(panel, 1),
  p: (panel) => walk(panel, -1),
  ArrowDown: (panel) => changeDevice(panel, 1),
  ArrowUp: (panel) => changeDevice(panel, -1),
  Enter: zoomToSelected,
  Escape: () => (view.selected = null),
};

function pressed(panel, event) {
  const act = KEYS[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act(panel);
  changed();
}

// Selects the next action of the same track, or of the first device where none is selected.
function walk(panel, step) {
  const action = view.selected?.panel === panel ? view.selected.action : -1;
  if (action < 0) {
    const first = panel.rows[0].compute[lastBefore(panel.start, panel.rows[0].compute, view.from)];
    if (first !== undefined) view.selected = { panel, action: first };
    return;
  }
  const { compute, thin } = panel.rows[deviceOf(panel, action)];
  const track = panel.styles[panel.style[action]].isThin ? thin : compute;
  select(panel, track[track.indexOf(action) + step]);
}

// Selects what the device below or above runs at the start of the selected action, or next after it.
function changeDevice(panel, step) {
  if (view.selected?.panel !== panel) return walk(panel, 0);
  const { action } = view.selected, device = deviceOf(panel, action) + step;
  if (device < 0 || device >= panel.numDevices) return undefined;
  const { compute } = panel.rows[device];
  return select(panel, compute[Math.min(firstAfter(panel.end, compute, panel.start[action]), compute.length - 1)]);
}

function select(panel, action) {
  if (action === undefined) return;
  view.selected = { panel, action };
  if (panel.end[action] > view.to || panel.start[action] < view.from) {
    const half = (view.to - view.from) / 2, middle = (panel.start[action] + panel.end[action]) / 2;
    show(middle - half, middle + half);
  }
}

function zoomToSelected() {
  if (!view.selected) return;
  const { panel, action } = view.selected;
  const span = Math.max(panel.end[action] - panel.start[action], panel.makespan / 1000);
  show(panel.start[action] - 4 * span, panel.end[action] + 4 * span);
}
