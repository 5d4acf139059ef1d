// Starts the page. After a change of the view it draws what is on the screen, once a frame.

let allPanels = [];
let isDue = false;

function changed() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  readColours();
  view.width = document.getElementById("panels").clientWidth - 32;
  document.getElementById("clock").value = view.clock;
  document.getElementById("memory").checked = view.memory;
  document.getElementById("path").checked = view.path;
  document.getElementById("range").textContent = `time ${number(view.from)} to ${number(view.to)}`;
  paintAxis(document.getElementById("axis"));
  for (const panel of allPanels) {
    panel.section.hidden = !isShown(panel);
    panel.layout = tracksOf(panel);
    panel.stack.style.height = `${panel.layout.height}px`;
  }
  paintVisible();
  tellSelected();
  writeAddress(allPanels);
}

function paintVisible() {
  for (const panel of allPanels) {
    if (!isShown(panel)) continue;
    const { top, bottom } = panel.section.getBoundingClientRect();
    if (bottom > -MARGIN && top < innerHeight + MARGIN) paintPanel(panel);
  }
}

function failed(message) {
  document.body.prepend(element("p", { id: "error", role: "alert" }, `This page could not be drawn: ${message}`));
}

addEventListener("error", (event) => failed(event.message));
addEventListener("unhandledrejection", (event) => failed(event.reason));

readPanels().then((panels) => {
  allPanels = panels;
  view.longest = Math.max(...panels.map((panel) => panel.makespan)) || 1;
  const most = Math.max(...panels.map(mostStored), ...panels.map((panel) => panel.bound ?? 0)) || 1;
  panels.forEach((panel) => {
    panel.most = most;
    addPanel(panel);
  });
  readAddress(panels);
  addControls(panels);
  draw();
  document.documentElement.dataset.state = "drawn";
});
