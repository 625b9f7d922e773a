// The panels that follow the stream: truth, time to everywhere, who holds it up, changes, objects
// and replicas.
import { filter, why } from './map.js';
import { model } from './model.js';
import {
  $, ORDER, STATES, bar, clock, count, duration, empty, exception, fill, h, link, mark, say, sign,
  stateWords, table, thousands,
} from './words.js';

// What other modules do when a name is pressed.
export const open = { node: () => {}, service: () => {} };

const age = (unixMs) => Math.max(0, Date.now() - unixMs);
const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);

export function byState() {
  const counts = Object.fromEntries(ORDER.map((name) => [name, 0]));
  for (const node of model.nodes.values()) counts[node.state] += 1;
  return counts;
}

export function truth(redraw) {
  const counts = byState(), all = model.nodes.size, well = counts.well + counts.degraded;
  const isKnown = model.link.up && model.isComplete;
  let text = `${thousands(well)} of ${count(all, 'Node')} ${all === 1 ? 'forwards' : 'forward'} what the API says`;
  if (all > 0 && well === all) text = all === 1 ? 'The only Node forwards what the API says' : `All ${text.split(' of ')[1]}`;
  if (all === 0) text = isKnown ? 'No Node and no agent is known' : 'Asking the control plane';
  if (!isKnown && all > 0) text = `Not known now. Before: ${text}`;
  say('truth', text);
  $('truth').classList.toggle('known-before', !isKnown);
  document.title = `${isKnown ? `${thousands(well)}/${thousands(all)}` : '?'} · Headgate`;
  const recent = [...model.nodes.values()].filter((node) => node.verified > Date.now() - 20 * 60_000).length;
  say('truth-more', !isKnown ? model.link.problem ?? '' : all === 0 ? '' : `${thousands(recent)} verified against their kernels in the last 20 minutes` +
    (counts.degraded ? ` · ${thousands(counts.degraded)} of the ${thousands(well)} are degraded` : ''));
  // The legend has only the states that exist.
  for (const name of ORDER) $('legend').children[ORDER.length - 1 - ORDER.indexOf(name)].hidden = name !== 'well' && !counts[name];
  const exceptions = ORDER.filter((name) => name !== 'well' && counts[name]);
  if (filter.state && !counts[filter.state]) filter.state = undefined;
  fill($('exceptions'), [exceptions.map((name) => [name, counts[name]]), filter.state], () =>
    exceptions.map((name) => h('button', {
      class: 'chip', type: 'button', 'aria-pressed': String(filter.state === name), 'data-key': name,
      onclick: () => { filter.state = filter.state === name ? undefined : name; redraw(); },
    }, mark(name), h('span', {}, h('b', {}, thousands(counts[name])), ` ${exception(name)}`))));
  say('map-count', all ? `${thousands(all)} in ${count(new Set([...model.nodes.values()].map((node) => node.zone)).size, 'zone')}` : '');
}

export function linkState() {
  const { up, problem, retry_ms: retry, at } = model.link, { status } = model;
  $('link').classList.toggle('down', !up);
  say('link', up ? 'live' : problem ? 'not connected' : 'connecting');
  $('link').title = up ? model.link.server : `since ${clock(at)}${retry ? `, tries again in ${duration(retry)}` : ''}`;
  say('facts', status.replica === undefined ? '' :
    `${status.source} · version ${thousands(status.version)} · ${count(status.services, 'Service')}, ` +
    `${count(status.endpoints, 'endpoint')} · asked ${status.replica}`);
}

// Time to everywhere: three figures, a dot for each change on a logarithmic scale, slowest Nodes.
const KINDS = { done: 'accent', running: 'warn', incomplete: 'soft' };
export function time(colours) {
  const changes = [...model.changes.values()];
  const took = changes.filter((change) => change.state === 'done').map((change) => change.took).sort((a, b) => a - b);
  const quantile = (share) => took[Math.min(took.length - 1, Math.ceil(took.length * share) - 1)];
  const fleet = model.status.fleet ?? {};
  const figures = took.length ? { p50: quantile(0.5), p99: quantile(0.99), max: took.at(-1) } :
    fleet.measured_commits ? { p50: fleet.everywhere_p50_ms, p99: fleet.everywhere_p99_ms, max: fleet.everywhere_max_ms } : {};
  fill($('time-figures'), figures, () => ['p50', 'p99', 'max'].map((name) =>
    h('div', {}, h('dt', {}, name), h('dd', {}, figures[name] === undefined ? '–' : duration(figures[name])))));
  say('time-count', took.length ? `last ${count(took.length, 'change')}` : '');
  spark(changes, figures, colours);
  const slow = new Map();
  for (const change of changes.filter(({ slowest }) => slowest)) {
    const entry = slow.get(change.slowest) ?? { node: change.slowest, times: 0, worst: 0, reason: '' };
    entry.times += 1;
    if (change.took >= entry.worst) Object.assign(entry, { worst: change.took, reason: change.reason });
    slow.set(change.slowest, entry);
  }
  // A Node that was the last once, and fast, says nothing.
  const slowest = [...slow.values()].filter(({ times, worst }) => times > 2 || worst >= 1000)
    .sort((a, b) => b.worst - a.worst).slice(0, 5);
  fill($('slowest'), slowest, () => [slowest.length === 0 ? empty('No Node stands out') :
    table(['Node', '>Was last', '>Worst'], slowest.map(({ node, times, worst, reason }) => h('tr', { title: reason },
      h('td', {}, link(`slow-${node}`, node, () => open.node(node))),
      h('td', { class: 'number' }, `${thousands(times)}×`), h('td', { class: 'number' }, duration(worst)))), 'Slowest Nodes')]);
}

function spark(changes, figures, colours) {
  const canvas = $('spark'), ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.font = '10.5px system-ui, sans-serif';
  const top = Math.max(1000, ...changes.map((change) => change.took));
  const y = (ms) => height - 8 - (Math.log10(Math.max(ms, 1)) / Math.log10(top * 1.4)) * (height - 16);
  for (const ms of [10, 100, 1000, 10_000, 100_000].filter((ms) => ms < top * 1.4)) {
    context.fillStyle = colours.line;
    context.fillRect(0, Math.round(y(ms)), width, 1);
    context.fillStyle = colours.soft;
    context.textAlign = 'left';
    context.fillText(duration(ms).replace('.0', ''), 0, y(ms) - 3);
  }
  const left = 44, step = 4, shown = changes.slice(-Math.floor((width - left) / step));
  shown.forEach((change, index) => {
    const [x, size] = [width - 4 - (shown.length - index - 1) * step, change.state === 'done' ? 3 : 6];
    context.fillStyle = colours[KINDS[change.state]] ?? colours.accent;
    context.fillRect(x - size / 2, y(change.took) - size / 2, size, size);
  });
  for (const ms of [figures.p50, figures.p99].filter(Boolean)) {
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.55;
    for (let x = left; x < width; x += 6) context.fillRect(x, y(ms), 3, 1);
    context.globalAlpha = 1;
  }
  canvas.setAttribute('aria-label', changes.length === 0 ? 'No change is measured yet' :
    `The last ${count(changes.length, 'change')}: the slowest took ${duration(Math.max(...changes.map(({ took }) => took)))}`);
}

let showsAll = false;
export function holders() {
  const unwell = [...model.nodes.values()].filter((node) => node.state !== 'well').sort((a, b) =>
    ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || (b.lag ?? 0) - (a.lag ?? 0) ||
    (b.departed ?? 0) - (a.departed ?? 0) || (a.name < b.name ? -1 : 1));
  const shown = unwell.slice(0, showsAll ? 500 : 12);
  say('holders-count', unwell.length ? thousands(unwell.length) : '');
  $('holders-all').hidden = unwell.length <= 12;
  say('holders-all', showsAll ? 'Show the worst' : `Show all ${thousands(unwell.length)}`);
  const key = shown.map((node) => [node.name, node.state, why(node), since(node)]);
  fill($('holders-list'), [key, model.link.up], () => [unwell.length === 0 ?
    empty(model.link.up && model.isComplete ? 'Nobody: every Node is up to date' : 'Not known now') :
    table(['Node', 'State', '>For', 'Why, and what to do'], shown.map((node) => h('tr', {},
      h('td', {}, link(`held-${node.name}`, node.name, () => open.node(node.name)),
        h('p', { class: 'quiet nowrap' }, [node.zone, node.pool].filter(Boolean).join(' ▸ '))),
      h('td', {}, stateWords(node.state)), h('td', { class: 'number' }, since(node)),
      h('td', {}, h('p', {}, why(node)), h('p', { class: 'quiet' }, STATES[node.state].remedy)))), 'Nodes that are not well')]);
}

// Rounded, so that the list changes rarely.
function since(node) {
  if (node.lag) return `> ${duration(node.lag).replace('.0', '')}`;
  if (!node.departed) return '';
  const minutes = Math.floor(age(node.departed) / 60_000);
  return minutes < 1 ? '< 1 min' : minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h`;
}

export const startHolders = () =>
  $('holders-all').addEventListener('click', () => { showsAll = !showsAll; holders(); });

let isPaused = false;
export function changes() {
  const all = [...model.changes.values()];
  if (isPaused) return;
  const skipped = model.leftOut ? `${thousands(model.leftOut)} faster ones are not listed` : '';
  say('changes-rate', skipped);
  const shown = all.slice(-40).sort((a, b) => b.version - a.version);
  const slow = Math.max(1000, ...shown.map((change) => change.took));
  fill($('changes-list'), shown.map(({ version, took, state, missing }) => [version, took, state, missing]), () => [
    shown.length === 0 ? empty('None since this page was opened') :
      table(['Time', 'Service', 'Everywhere'], shown.map((change) => changeRow(change, slow)), 'Changes, the newest first')]);
}

function changeRow(change, slow) {
  const { version, at, service, endpoint, changed, trigger, took, nodes, missing, state, slowest, reason } = change;
  const [namespace, name] = service.split('/');
  const share = Math.log10(1 + took) / Math.log10(1 + slow);
  const words = { done: duration(took), running: `running, ${duration(took)}`, incomplete: 'incomplete' }[state];
  const who = state === 'done' ? `last: ${slowest}` :
    `${thousands(missing)} missing: ${slowest} ${reason}`;
  return h('tr', { title: `version ${version}, measured from the ${trigger}, on ${count(nodes, 'Node')}` },
    h('td', { class: 'nowrap quiet' }, clock(at)),
    h('td', {}, link(`change-${version}`, service || '(several)', () => name && open.service(namespace, name)),
      h('p', { class: 'quiet' }, endpoint || (changed > 1 ? '' : 'the Service'), changed > 1 ? ` and ${thousands(changed - 1)} more` : '')),
    h('td', { class: state === 'running' ? 'text-warn' : '' }, h('div', { class: 'meter nowrap' }, bar(share, 48), words),
      h('p', { class: 'quiet' }, who)));
}

export const startChanges = () => $('pause').addEventListener('click', (event) => {
  isPaused = !isPaused;
  event.target.setAttribute('aria-pressed', String(isPaused));
  event.target.textContent = isPaused ? 'Continue' : 'Pause';
  changes();
});

// Rejected objects, quarantined Services, and counts that lead to the table of Services.
export function problems(showServices) {
  const { problems: rejected = [], conflicts = 0, services_without_ready_endpoints: unready = 0 } = model.status;
  const rejecting = [...model.nodes.values()].filter((node) => node.rejected);
  const key = [rejected, conflicts, unready, rejecting.map((node) => [node.name, node.rejected])];
  say('problems-count', rejected.length + conflicts + rejecting.length ? thousands(rejected.length + conflicts + rejecting.length) : '');
  const item = (look, ...children) => h('li', {}, sign(look), ...children);
  fill($('problems-list'), key, () => {
    const items = [
      conflicts > 0 && item('bad', link('conflicts', `${count(conflicts, 'Service')} in conflict`, () => showServices('conflict')),
        ': another Service owns an address or a port'),
      ...rejecting.slice(0, 50).map((node) => item('bad', link(`rejecting-${node.name}`, node.name, () => open.node(node.name)),
        ` holds ${count(node.rejected, 'resource')} in quarantine: the last good rules stay`)),
      unready > 0 && item('warn', link('unready', `${count(unready, 'Service')} without a ready endpoint`, () => showServices('unready'))),
      ...rejected.slice(0, 200).map(({ object, field, message, origin }) => item('warn',
        h('b', {}, object), field && h('span', { class: 'mono' }, ` ${field}`), h('p', {}, message), origin && h('p', { class: 'quiet' }, origin))),
    ].filter(Boolean);
    return [items.length ? h('ul', { class: 'list' }, items) : empty('No object is rejected, in conflict or in quarantine')];
  });
}

const SOURCE = { following: 'well', cut_off: 'cut_off', unlisted: 'waiting' };
export function replicas() {
  const { status } = model;
  if (status.replica === undefined) return;
  const others = status.replicas ?? [];
  const own = sum(others.map((other) => -other.agents)) + [...model.nodes.values()].filter((node) => node.replica).length;
  const self = { ...status, agents: status.agents ?? own, state: 'asked', problem: status.source_problem };
  const all = [self, ...others], most = Math.max(1, ...all.map(({ agents }) => agents));
  const ages = (status.source_ages ?? []).map(({ kind, age_ms: ms }) => `${kind.replaceAll('_', ' ')} ${duration(ms)}`).join(', ');
  say('replicas-count', count(all.length, 'replica'));
  fill($('replicas-list'), [all, ages], () => [
    table(['Replica', 'Source', '>Heard', '>Agents', 'Build', 'Certificate'], all.map((one) => h('tr', {},
      h('td', {}, h('b', {}, one.replica || 'unknown'), h('p', { class: one.state === 'joined' || one === self ? 'quiet' : 'text-bad' },
        one === self ? 'answers this page' : `${one.state} for ${duration(one.for_ms)}`), one.problem && h('p', { class: 'text-bad' }, one.problem)),
      h('td', {}, one.source_state ? h('span', { class: 'state' }, mark(SOURCE[one.source_state] ?? 'waiting'), one.source_state.replace('_', ' ')) : '–',
        h('p', { class: 'quiet' }, behindSource(one, all))),
      h('td', { class: 'number', title: one === self ? ages : undefined }, one.source_state ? duration(one.source_age_ms) : '–'),
      h('td', { class: 'number' }, thousands(one.agents), h('div', { class: 'meter' }, bar(one.agents / most, 90)),
        one.balance_limit > 0 && h('p', { class: 'quiet' }, `moves some above ${thousands(one.balance_limit)}`)),
      h('td', {}, one.build || '–'), h('td', {}, certificate(one.certificate_not_after_unix_ms)))), 'Replicas'),
    h('p', { class: 'empty' }, `Agents: ${(status.fleet?.agent_versions ?? []).map(({ version, agents }) => `${thousands(agents)} of ${version}`).join(', ') || 'none'}`)]);
}

// How far the kinds of a replica are behind the newest positions of all.
function behindSource(one, all) {
  const position = (replica, kind) => (replica.positions ?? []).find((other) => other.kind === kind)?.position ?? 0;
  const late = (one.positions ?? []).filter(({ kind, position: own }) => all.some((other) => position(other, kind) > own));
  return late.length ? `behind another replica in ${late.map(({ kind }) => String(kind).toLowerCase().replaceAll('_', ' ')).join(', ')}` : '';
}

function certificate(notAfter) {
  if (!notAfter) return 'no TLS';
  const days = Math.floor((notAfter - Date.now()) / 86_400_000);
  return h('span', { class: days < 14 ? 'text-bad' : '' }, days < 0 ? 'has expired' : `${count(days, 'day')} left`);
}
