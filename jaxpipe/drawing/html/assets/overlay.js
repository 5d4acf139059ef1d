// The layer over a panel: the critical path; outline and messages of the selected and of the hovered action.

function paintOverlay(panel) {
  const context = sized(panel.overlay, view.width, panel.layout.height);
  context.save();
  context.beginPath();
  context.rect(LEFT - 2, 0, plotWidth() + 4, panel.layout.height);
  context.clip();
  if (view.path) paintPath(context, panel);
  for (const chosen of [view.selected, view.hovered]) {
    if (chosen?.panel === panel && chosen.action >= 0) paintChosen(context, panel, chosen.action);
  }
  if (view.hovered?.panel === panel) {
    context.fillStyle = colours.softInk;
    context.fillRect(xOf(view.hovered.time), 0, 1, panel.layout.height);
  }
  context.restore();
}

function paintPath(context, panel) {
  const path = criticalPath(panel), points = [];
  for (const action of path) {
    if (panel.end[action] < view.from || panel.start[action] > view.to) continue;
    const box = boxOf(panel, action), edge = box.top + box.height - 1; // numbers stay readable
    points.push([box.left, edge], [box.left + box.width, edge]);
  }
  for (const [width, ink] of [[5, colours.halo], [2.2, colours.path]]) {
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach(([x, y], place) => (place ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  }
}

function paintChosen(context, panel, action) {
  const device = deviceOf(panel, action);
  outline(context, boxOf(panel, action), colours.ink);
  const cause = panel.criticalPredecessor[action];
  if (cause >= 0 && deviceOf(panel, cause) !== device) outline(context, boxOf(panel, cause), colours.path);
  if (panel.message[action] >= 0) arrow(context, boxOf(panel, panel.message[action]), boxOf(panel, action));
  for (const reader of readersOf(panel, action)) arrow(context, boxOf(panel, action), boxOf(panel, reader));
}

// The actions that read the message of `action`.
function readersOf(panel, action) {
  if (!panel.readers) {
    panel.readers = new Map();
    panel.message.forEach((sender, reader) => {
      if (sender >= 0) panel.readers.set(sender, [...(panel.readers.get(sender) ?? []), reader]);
    });
  }
  return panel.readers.get(action) ?? [];
}

function outline(context, box, ink) {
  for (const [width, stroke] of [[5, colours.halo], [2, ink]]) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.strokeRect(box.left, box.top, box.width, box.height);
  }
}

function arrow(context, source, target) {
  const from = [source.left + source.width, source.top + source.height / 2];
  const to = [target.left, target.top + target.height / 2];
  if (from[1] === to[1]) return;
  const bend = Math.max((to[0] - from[0]) / 2, 10);
  for (const [width, ink] of [[4, colours.halo], [1.6, colours.ink]]) {
    context.strokeStyle = ink;
    context.fillStyle = ink;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(...from);
    context.bezierCurveTo(from[0] + bend, from[1], to[0] - bend, to[1], ...to);
    context.stroke();
    context.beginPath();
    context.moveTo(...to);
    context.lineTo(to[0] - 7, to[1] - 3.5);
    context.lineTo(to[0] - 7, to[1] + 3.5);
    context.fill();
  }
}
