// The map of all Nodes on a canvas: zones beside each other, pools in them, one cell for each Node.
import { grouping, model } from './model.js';
import { $, ORDER, STATES, count, exception, h, mark, say, thousands } from './words.js';

const board = $('board'), canvas = $('canvas'), tip = $('tip');
const context = canvas.getContext('2d');
const GAP = 18, HEAD = 20, SUB = 17;
// Up to this number of Nodes, cells have names.
const NAMED = 48;

let layout = { groups: [], cell: 0, wide: 0, places: new Map() };
let focused, hovered, open = () => {}, colours = {};
// Only these states, and Nodes that lack something, are bright.
export const filter = { state: undefined, names: undefined };

export function onOpen(callback) { open = callback; }

// Colours as the browser resolved them, for the present theme.
export function readColours() {
  const resolve = (name, property) =>
    getComputedStyle($('legend').querySelector(`.mark.${name}`))[property];
  colours = {
    well: resolve('well', 'backgroundColor'), bad: resolve('bad', 'backgroundColor'),
    warn: resolve('warn', 'backgroundColor'), gone: resolve('gone', 'backgroundColor'),
    inkBad: resolve('bad', 'color'), inkWarn: resolve('warn', 'color'), inkGone: resolve('gone', 'color'),
    ink: getComputedStyle(document.body).color, soft: getComputedStyle($('board-help')).color,
    accent: getComputedStyle($('find-node')).caretColor, ground: getComputedStyle($('map')).backgroundColor,
    line: getComputedStyle($('map')).borderTopColor,
  };
  return colours;
}

// Places all groups with cells of this size. Zones stand in columns.
function place(groups, width, cell, tile) {
  const zones = Map.groupBy(groups, (group) => group.zone);
  const most = Math.max(1, Math.floor(width / (tile ? 200 : 230)));
  const columns = Math.min(most, zones.size || 1);
  const column = (width - GAP * (columns - 1)) / columns;
  const bottoms = new Array(columns).fill(0);
  const placed = [], heads = [];
  const across = tile ? Math.max(1, Math.floor(column / 150)) : Math.max(1, Math.floor(column / cell));
  const wide = tile ? column / across : cell, high = tile ? 50 : cell;
  const used = across * wide - (tile ? 6 : 1);
  for (const [zone, members] of zones) {
    const at = bottoms.indexOf(Math.min(...bottoms));
    const x = at * (column + GAP);
    let y = bottoms[at];
    const all = members.reduce((sum, group) => sum + group.nodes.length, 0);
    heads.push({ text: zone || 'no zone', note: thousands(all), x, y: y + 13, width: used });
    y += HEAD;
    for (const group of members) {
      heads.push({ text: group.pool || 'no pool', note: thousands(group.nodes.length), x, y: y + 12, width: used, isSub: true });
      y += SUB;
      const rows = Math.ceil(group.nodes.length / across);
      placed.push({ group, x, y, across, rows });
      y += rows * high + 8;
    }
    bottoms[at] = y + 8;
  }
  return { placed, heads, wide, high, height: Math.max(60, ...bottoms) - 12 };
}

function arrange() {
  const groups = grouping(), width = board.clientWidth;
  if (layout.groups === groups && layout.width === width && layout.tall === innerHeight) return;
  const tile = model.nodes.size <= NAMED;
  const goal = Math.min(Math.max(innerHeight * 0.56, 320), 640);
  let cell = tile ? 0 : 30;
  let found = place(groups, width, cell, tile);
  while (!tile && cell > 6 && found.height > goal) found = place(groups, width, --cell, tile);
  const places = new Map();
  const list = [];
  for (const one of found.placed) {
    one.group.nodes.forEach((node, index) => {
      places.set(node.name, { place: one, index, at: list.length });
      list.push(node.name);
    });
  }
  layout = { ...found, groups, tile, places, list, width, tall: innerHeight };
}

function corner({ place: { x, y, across }, index }) {
  return [x + (index % across) * layout.wide, y + Math.floor(index / across) * layout.high];
}

const isBright = (node) =>
  filter.names ? filter.names.has(node.name) : filter.state === undefined || filter.state === node.state;

export function draw() {
  arrange();
  const ratio = devicePixelRatio || 1;
  const [width, height] = [Math.round(layout.width * ratio), Math.round(layout.height * ratio)];
  if (canvas.width !== width || canvas.height !== height) {
    Object.assign(canvas, { width, height });
    canvas.style.height = `${layout.height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, layout.width, layout.height);
  context.textBaseline = 'alphabetic';
  for (const { text, note, x, y, width: room, isSub } of layout.heads) {
    context.textAlign = 'left';
    context.font = `${isSub ? 400 : 600} ${isSub ? 11 : 12.5}px system-ui, sans-serif`;
    context.fillStyle = isSub ? colours.soft : colours.ink;
    context.fillText(text, x, y, room - 50);
    context.textAlign = 'right';
    context.font = '400 11px system-ui, sans-serif';
    context.fillStyle = colours.soft;
    context.fillText(note, x + room, y);
  }
  const unwell = [];
  const inset = layout.tile ? 6 : layout.wide > 12 ? 2 : 1;
  for (const bright of [false, true]) {
    context.fillStyle = colours.well;
    context.globalAlpha = bright ? 1 : 0.28;
    context.beginPath();
    for (const [name, where] of layout.places) {
      const node = model.nodes.get(name);
      if (isBright(node) !== bright) continue;
      if (node.state !== 'well' || filter.names?.has(name)) { unwell.push([node, where, bright]); continue; }
      const [x, y] = corner(where);
      if (layout.tile) context.roundRect(x, y, layout.wide - inset, layout.high - inset, 6);
      else context.rect(x, y, layout.wide - inset, layout.high - inset);
    }
    context.fill();
  }
  // If only few are not well, their marks are larger than a cell, so that nobody overlooks them.
  const isFew = unwell.length < layout.places.size / 20;
  unwell.sort(([a], [b]) => ORDER.indexOf(b.state) - ORDER.indexOf(a.state));
  for (const [node, where, bright] of unwell) drawMark(node, where, bright ? 1 : 0.28, isFew, inset);
  context.globalAlpha = 1;
  if (layout.tile) drawNames(inset);
  for (const [name, colour] of [[hovered, colours.soft], [focused, colours.accent]]) {
    const where = layout.places.get(name);
    if (!where || (name === focused && document.activeElement !== board && name !== hovered)) continue;
    const [x, y] = corner(where);
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.strokeRect(x - 2, y - 2, layout.wide - inset + 4, layout.high - inset + 4);
  }
}

function drawMark(node, where, alpha, isFew, inset) {
  const { look, letter } = STATES[node.state];
  let [x, y] = corner(where);
  let [w, h] = [layout.wide - inset, layout.high - inset];
  if (!layout.tile && isFew && w < 15) {
    const { place } = where, right = place.x + place.across * layout.wide - 16;
    const bottom = Math.max(place.y, place.y + place.rows * layout.high - 16);
    [x, y, w, h] = [Math.min(right, Math.max(place.x, x - (15 - w) / 2)), Math.min(bottom, Math.max(place.y, y - (15 - h) / 2)), 15, 15];
    context.globalAlpha = 1;
    context.fillStyle = colours.ground;
    context.fillRect(x - 1.5, y - 1.5, w + 3, h + 3);
  }
  context.globalAlpha = alpha;
  context.beginPath();
  context.roundRect(x + 0.5, y + 0.5, w - 1, h - 1, layout.tile ? 6 : Math.min(4, w / 4));
  context.fillStyle = colours[look];
  context.fill();
  if (look === 'gone') {
    context.strokeStyle = colours.inkGone;
    context.lineWidth = 1.4;
    context.stroke();
  }
  if (h < 7 || layout.tile) return;
  context.fillStyle = { bad: colours.inkBad, warn: colours.inkWarn, gone: colours.inkGone }[look] ?? colours.ink;
  context.font = `700 ${Math.min(14, Math.max(7, h * 0.74))}px system-ui, sans-serif`;
  context.textAlign = 'center';
  context.fillText(letter, x + w / 2, y + h / 2 + Math.min(14, h * 0.74) * 0.36);
}

function drawNames(inset) {
  context.textAlign = 'left';
  for (const [name, where] of layout.places) {
    const node = model.nodes.get(name), { look, letter, words } = STATES[node.state];
    const [x, y] = corner(where);
    context.fillStyle = { bad: colours.inkBad, warn: colours.inkWarn, gone: colours.inkGone }[look] ?? colours.ink;
    context.font = '600 12px system-ui, sans-serif';
    context.fillText(name, x + 10, y + 18, layout.wide - inset - 20);
    context.font = '400 11px system-ui, sans-serif';
    context.fillText(letter ? `${letter}  ${words}` : words, x + 10, y + 34, layout.wide - inset - 20);
  }
}

function at(x, y) {
  for (const { group, x: left, y: top, across, rows } of layout.placed ?? []) {
    const column = Math.floor((x - left) / layout.wide), row = Math.floor((y - top) / layout.high);
    if (column < 0 || column >= across || row < 0 || row >= rows) continue;
    return group.nodes[row * across + column]?.name;
  }
  return undefined;
}

export const why = (node) => node.error ?? node.reason ?? node.degraded?.[0] ??
  (node.drift ? `${count(node.drift, 'difference')} at the last verification` : undefined) ??
  (node.rejected ? `rejects ${count(node.rejected, 'resource')}` : undefined) ??
  (node.lag ? `behind for more than ${node.lag / 1000} s` : '');

const spoken = (node) => [node.name, `zone ${node.zone || 'none'}`, `pool ${node.pool || 'none'}`,
  STATES[node.state].words, why(node)].filter(Boolean).join(', ');

function hover(event) {
  const box = canvas.getBoundingClientRect();
  const name = at(event.clientX - box.left, event.clientY - box.top);
  if (name !== hovered) {
    hovered = name;
    draw();
  }
  const node = model.nodes.get(name);
  tip.hidden = !node;
  if (!node) return;
  const reason = why(node);
  tip.replaceChildren(h('b', {}, name), h('div', {}, `${node.zone || 'no zone'} ▸ ${node.pool || 'no pool'}`),
    h('div', {}, STATES[node.state].words, reason && `: ${reason}`));
  const [w, y] = [tip.offsetWidth, event.clientY + 16];
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - w - 12))}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : y}px`;
}

export function focusOn(name) {
  focused = name;
  const node = model.nodes.get(name);
  if (node) say('board-said', spoken(node));
  draw();
}

function move(event) {
  const { places, list } = layout;
  const here = places.get(focused) ?? { at: -1, index: 0, place: layout.placed?.[0] };
  if (!here.place) return;
  const { across, group } = here.place;
  const step = (by) => list[Math.min(list.length - 1, Math.max(0, here.at + by))];
  const after = [...list.slice(here.at + 1), ...list.slice(0, here.at + 1)];
  const next = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1),
    ArrowDown: () => step(Math.min(across, Math.max(1, group.nodes.length - here.index))),
    ArrowUp: () => step(-Math.min(across, here.index + 1)),
    Home: () => list[0], End: () => list.at(-1),
    PageDown: () => step(group.nodes.length - here.index),
    PageUp: () => step(-here.index - 1),
    n: () => after.find((name) => model.nodes.get(name).state !== 'well'),
  }[event.key];
  if (event.key === 'Enter' && focused) open(focused);
  else if (next) focusOn(next() ?? focused);
  else return;
  event.preventDefault();
}

export function start() {
  $('legend').replaceChildren(...ORDER.toReversed().map((name) => h('li', {}, mark(name), STATES[name].words)));
  board.addEventListener('pointermove', hover);
  board.addEventListener('pointerleave', () => { tip.hidden = true; hovered = undefined; draw(); });
  board.addEventListener('click', (event) => {
    const box = canvas.getBoundingClientRect();
    const name = at(event.clientX - box.left, event.clientY - box.top);
    if (name) { focusOn(name); open(name); }
  });
  board.addEventListener('keydown', move);
  board.addEventListener('focus', () => (focused ? draw() : focusOn(layout.list?.[0])));
  board.addEventListener('blur', draw);
  $('find').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = $('find-node').value.trim();
    const found = layout.list?.find((name) => name === text) ?? layout.list?.find((name) => name.includes(text));
    if (text && found) { focusOn(found); open(found); } else say('board-said', `No Node is called ${text}`);
  });
  new ResizeObserver(() => draw()).observe(board);
}

// The counts of each group as a table, for those who do not see the map.
export function groupCounts() {
  return grouping().map(({ zone, pool, nodes }) => {
    const counts = Object.groupBy(nodes, (node) => node.state);
    const others = ORDER.filter((name) => name !== 'well' && counts[name])
      .map((name) => `${thousands(counts[name].length)} ${exception(name)}`);
    return [zone || 'none', pool || 'none', nodes.length, counts.well?.length ?? 0, others.join(', ') || 'none'];
  });
}
