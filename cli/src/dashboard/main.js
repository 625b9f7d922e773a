// The page: joins the stream, the map and the panels.
import * as asking from './ask.js';
import * as drawer from './drawer.js';
import * as map from './map.js';
import { follow, model } from './model.js';
import * as panels from './panels.js';
import * as services from './services.js';
import { $, fill, h, table, thousands } from './words.js';

// Colours of the canvases, as the theme resolved them.
let colours = {};
// What a message of the stream makes stale, and what is drawn at most twice a second.
const STALE = {
  link: ['truth', 'link', 'holders', 'services'], status: ['link', 'replicas', 'problems', 'time'],
  nodes: ['truth', 'map', 'holders', 'groups', 'problems', 'replicas'], times: ['time', 'changes'],
};
const PARTS = {
  truth: () => panels.truth(() => stale('truth', 'map')), link: panels.linkState, map: map.draw,
  time: () => panels.time(colours), holders: panels.holders, changes: panels.changes,
  problems: () => panels.problems(services.only), replicas: panels.replicas, services: services.loadInView, groups,
};
const waiting = new Set();
let due;

function stale(...parts) {
  for (const part of parts) waiting.add(part);
  // Frames of a page in the background do not come, and a timer keeps the page from drawing often.
  due ??= setTimeout(() => requestAnimationFrame(render), 120);
}

function render() {
  due = undefined;
  for (const part of [...waiting]) {
    waiting.delete(part);
    PARTS[part]();
  }
  if (model.isComplete && model.nodes.size && !performance.getEntriesByName('first-view').length) {
    performance.mark('first-view');
  }
}

function groups() {
  if (!$('groups').open) return;
  const rows = map.groupCounts();
  fill($('groups').querySelector('div'), rows, () => [table(['Zone', 'Pool', '>Nodes', '>Up to date', 'Others'],
    rows.map(([zone, pool, all, well, others]) => h('tr', {}, h('th', { scope: 'row' }, zone), h('td', {}, pool),
      h('td', { class: 'number' }, thousands(all)), h('td', { class: 'number' }, thousands(well)), h('td', {}, others))),
    'Nodes of each zone and pool')]);
}

const THEMES = { system: 'Theme: system', light: 'Theme: light', dark: 'Theme: dark' };
function theme(name) {
  localStorage.setItem('theme', name);
  if (name === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $('theme').textContent = THEMES[name];
  colours = map.readColours();
  stale('map', 'time');
}

const openService = (namespace, name) =>
  services.follow(namespace, name, () => stale('map'), drawer.nodeCard);
panels.open.node = drawer.nodeCard;
panels.open.service = openService;
map.onOpen(drawer.nodeCard);
map.start();
drawer.start();
asking.start();
services.start(openService);
panels.startHolders();
panels.startChanges();
$('groups').addEventListener('toggle', groups);
theme(localStorage.getItem('theme') ?? 'system');
$('theme').addEventListener('click', () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(localStorage.getItem('theme')) + 1) % names.length]);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => theme(localStorage.getItem('theme')));
addEventListener('resize', () => stale('time'));
// Ages grow without messages.
setInterval(() => stale('holders'), 20_000);
follow((kind) => stale(...(STALE[kind] ?? [])));
