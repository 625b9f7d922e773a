// The drawer at the right: the card of a Node, or one Service.
import { answer, fillIn, run } from './ask.js';
import { why } from './map.js';
import { ask, model } from './model.js';
import { $, STATES, clock, count, duration, facts, h, kids, mark, stateWords, thousands } from './words.js';

let before, closed = () => {};

export function openDrawer(title, whenClosed = () => {}) {
  closed();
  closed = whenClosed;
  if ($('drawer').hidden) before = document.activeElement;
  $('drawer').hidden = false;
  $('drawer').scrollTop = 0;
  $('drawer-title').textContent = title;
  $('drawer-title').focus();
  $('drawer-body').replaceChildren(h('p', { class: 'quiet' }, 'Asking…'));
  return $('drawer-body');
}

export function close() {
  if ($('drawer').hidden) return;
  $('drawer').hidden = true;
  closed();
  closed = () => {};
  before?.focus();
}

export function start() {
  $('drawer-close').addEventListener('click', close);
  document.addEventListener('keydown', (event) => { if (event.key === 'Escape') close(); });
}

const ago = (unixMs) => (unixMs ? `${duration(Date.now() - unixMs)} ago` : 'never');

export async function nodeCard(name) {
  const body = openDrawer(name), known = model.nodes.get(name);
  const told = h('div', { 'aria-live': 'polite' });
  const button = (text, onclick) => h('button', { type: 'button', onclick }, text);
  const tell = async (what) => { told.replaceChildren(answer(await run(what))); };
  const actions = h('div', { class: 'actions' },
    known?.state !== 'no_agent' && button('Ask its agent', () => tell({ command: 'node', node: name })),
    known?.state !== 'no_agent' && button('Verify', () => tell({ command: 'verify', node: name })),
    button('Explain a Service here', () => { close(); fillIn('explain', { from: name }); }));
  const top = known ? [h('p', {}, stateWords(known.state)), h('p', {}, why(known)),
    h('p', { class: 'quiet' }, STATES[known.state].remedy)] : [];
  body.replaceChildren(...kids([top, actions, told]));
  try {
    const { agent } = await ask(`nodes/${name}`);
    const behind = agent.head_version - agent.programmed_version;
    const has = agent.state !== 'no_agent';
    const sentences = [...agent.drift.map(({ service, difference }) => ['drift', `${service} ${difference}`]),
      ...agent.rejections.map(({ object, field, message }) => ['rejecting', `${object} ${field}: ${message}`]),
      ...agent.degraded.map((text) => ['degraded', text])];
    body.replaceChildren(...kids([top,
      facts([['Zone, pool', [agent.zone || 'none', agent.pool || 'none'].join(' ▸ ')], ['Mode', agent.backend],
        ['Kernel has version', has ? `${thousands(agent.programmed_version)}${behind > 0 ? `, ${count(behind, 'version')} behind for ${duration(agent.lag_ms)}` : ', the newest'}` : ''],
        ['Verified', `${ago(agent.verified_unix_ms)}${agent.drift_count ? `, ${count(agent.drift_count, 'difference')}` : ''}`],
        ['Last change took', has && agent.apply_microseconds ? `${duration(agent.apply_microseconds / 1000)}, ${count(agent.services_planned, 'Service')}, ${count(agent.objects_written, 'object')}` : ''],
        ['Last seen', agent.departed_ms ? `${duration(agent.departed_ms)} ago` : ''],
        ['Connected', has ? `at ${clock(agent.connected_unix_ms)} from ${agent.address}, resumed by ${agent.resume}` : ''],
        ['Agent', agent.agent_version], ['Replica', agent.replica]]),
      sentences.length > 0 && h('h3', {}, 'Problems'),
      h('ul', { class: 'list' }, sentences.map(([look, text]) => h('li', {}, mark(look), text))), actions, told]));
  } catch (error) {
    body.append(h('p', { class: 'text-bad' }, error.message));
  }
}
