// Tests of the page in Chromium (`make page-test`): alone with a stand-in server of 5,000 and of 3
// Nodes, and with the real `headgatectl dashboard`, control plane and simulated agents.
//
// FLEET=5000 takes that number of simulated agents in place of 3. All processes end with this one.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { createServer, request } from 'node:http';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { LIMIT, close, isAccessible, keyboard, launch, measure, open, picture } from './browser.js';
import { start } from './mock.js';

const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const FLEET = Number(process.env.FLEET || 3);
const children = new Set();

function run(command, args, options = {}) {
  const child = spawn(command, args, { cwd: ROOT, ...options });
  children.add(child);
  child.once('exit', () => children.delete(child));
  return child;
}

// The first line of a program that matches.
async function line(child, pattern) {
  let timer;
  const found = new Promise((done, failed) => {
    const lines = createInterface({ input: child.stdout });
    lines.on('line', (text) => { if (pattern.test(text)) done(text); });
    child.once('exit', (code) => failed(new Error(`${child.spawnargs.join(' ')} ended with ${code}`)));
    timer = setTimeout(() => failed(new Error(`no ${pattern} from ${child.spawnargs[0]}`)), 10 * LIMIT);
  });
  return found.finally(() => clearTimeout(timer));
}

const inWords = async (page, texts) => {
  for (const text of texts) await page.getByRole('group', { name: /Exceptions/ }).getByText(text).waitFor();
  const table = page.getByRole('region', { name: 'Nodes that are not well' });
  for (const [state, count] of [['no agent', 3], ['behind', 2], ['failing', 1], ['drift', 1]]) {
    assert.equal(await table.locator('tbody tr', { has: page.locator('.state', { hasText: state }) }).count(), count, state);
  }
  console.log(`in words: ${texts.join(', ')}`);
};
const UNWELL = ['3 without an agent', '2 behind', '1 failing', '1 with drift'];
const TRUTH = '4,993 of 5,000 Nodes forward what the API says';

// What a user does at the table and the map, for the longest answer.
const use = (page) => async () => {
  const board = await page.locator('#board').boundingBox();
  for (let x = 20; x < 300; x += 40) await page.mouse.move(board.x + x, board.y + 60 + x / 3);
  await page.locator('#exceptions button').first().click();
  await page.locator('#exceptions button').first().click();
  await page.locator('#services-search').pressSequentially('cart-3', { delay: 40 });
  await page.locator('#services-search').fill('');
  await page.locator('#services-list').evaluate((list) => { list.scrollTop = 150_000; });
  await page.waitForTimeout(500);
};

async function alone(browser) {
  for (const [size, services] of [[5000, 10_000], [3, 12]]) {
    const mock = await start({ size, services });
    try {
      for (const colorScheme of ['light', 'dark']) {
        const page = await open(browser, mock.url, { colorScheme });
        assert.ok(!page.url().includes('token'), 'the token stays in the address');
        if (size === 5000) {
          assert.equal(await page.locator('h1').textContent(), TRUTH);
          await inWords(page, UNWELL);
        }
        await page.locator('#services').scrollIntoViewIfNeeded();
        await page.locator('#services-list tbody button').first().waitFor();
        await page.evaluate(() => scrollTo(0, 0));
        await picture(page, `${size}-${colorScheme}`);
        await picture(page, `${size}-${colorScheme}-whole`, { fullPage: true });
        await page.locator('#groups summary').click();
        await isAccessible(page, `${size} Nodes, ${colorScheme}`);
        if (colorScheme === 'light') await keyboard(page, size === 5000);
        await page.locator('#changes-list button, #services-list button').first().click();
        await page.locator('#drawer h3').first().waitFor();
        await isAccessible(page, `a Service of ${size} Nodes, ${colorScheme}`);
        await picture(page, `${size}-${colorScheme}-service`);
        await page.locator('#drawer-close').click();
        await close(page);
      }
      for (const width of [800, 2000]) {
        const page = await open(browser, mock.url, { viewport: { width, height: 900 } });
        const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(overflow <= 0, `the page is ${overflow} pixels too wide at ${width}`);
        await picture(page, `${size}-at-${width}`);
        await close(page);
      }
      if (size === 5000) {
        const page = await open(browser, mock.url);
        // The first lists are no traffic after loading.
        await page.locator('#changes-list tbody tr').first().waitFor();
        await measure(page, 15, use(page));
        await close(page);
      } else {
        const page = await open(browser, mock.url);
        mock.stop();
        await page.locator('h1', { hasText: 'Not known now. Before: All 3 Nodes' }).waitFor();
        await picture(page, 'lost');
        await page.context().close();
        console.log('a lost connection is no truth');
        break;
      }
    } finally { mock.stop(); }
  }
}

// The status of a request with these headers, past the browser.
const status = (url, path, headers = {}) => new Promise((done, failed) => {
  const { hostname, port } = new URL(url);
  const sent = request({ hostname, port, path, headers, timeout: LIMIT }, (response) => { response.resume(); done(response.statusCode); });
  sent.on('error', failed).end();
});

async function guarded(browser, url) {
  const { host, searchParams } = new URL(url), token = `Bearer ${searchParams.get('token')}`;
  const expected = [
    [200, '/', {}], [401, '/api/nodes/x', {}], [401, '/api/stream', { authorization: 'Bearer wrong' }],
    [403, '/', { host: 'evil.example' }], [403, '/api/nodes/x', { host: `evil.example:${host.split(':')[1]}`, authorization: token }],
    [403, '/api/nodes/x', { origin: 'http://evil.example', authorization: token }],
    [403, '/', { 'sec-fetch-site': 'cross-site' }], [404, '/api/nodes/no-such-node', { authorization: token }],
    [405, '/api/ask/verify', { authorization: token }], [404, '/../Cargo.toml', {}],
  ];
  for (const [code, path, headers] of expected) assert.equal(await status(url, path, headers), code, `${path} ${JSON.stringify(headers)}`);
  // A page of another origin in the same browser, which even knows the token.
  const other = createServer((_, response) => response.writeHead(200, { 'Content-Type': 'text/html' }).end('<title>other</title>'));
  await new Promise((done) => other.listen(0, '127.0.0.1', done));
  const page = await (await browser.newContext()).newPage();
  await page.goto(`http://127.0.0.1:${other.address().port}/`);
  const got = await page.evaluate(async ([base, bearer]) => {
    const answers = [];
    for (const path of ['/', '/main.js', '/api/stream', '/api/nodes/x']) {
      for (const [mode, headers] of [['cors', {}], ['no-cors', {}], ['cors', { authorization: bearer }]]) {
        const answer = await fetch(base + path, { mode, headers }).then(async (response) => response.type !== 'opaque' && response.text(), () => false);
        if (answer) answers.push([path, mode, answer]);
      }
    }
    const script = document.createElement('script');
    script.src = `${base}/words.js`;
    const loads = await new Promise((done) => { script.onload = () => done(true); script.onerror = () => done(false); document.head.append(script); });
    return [...answers, ...(loads ? [['script']] : [])];
  }, [`http://${host}`, token]);
  assert.deepEqual(got, [], 'another origin got an answer');
  const framed = await page.evaluate((base) => new Promise((done) => {
    const frame = document.createElement('iframe');
    frame.src = base;
    frame.onload = () => { try { done(frame.contentDocument?.body?.textContent ?? null); } catch { done(null); } };
    document.body.append(frame);
  }), `http://${host}/`);
  assert.equal(framed, null, 'another origin shows the page in a frame');
  other.close();
  await page.context().close();
  console.log('another origin, another host and a missing token get nothing');
}

// Waits until the page, the command and the metric say that this number of Nodes has no agent.
async function absent(page, connection, server, number) {
  const began = Date.now();
  const seconds = async (who, says) => {
    while (!await says()) {
      assert.ok(Date.now() - began < LIMIT, `${who} does not say that ${number} Nodes have no agent`);
      await page.waitForTimeout(100);
    }
    return `${who} after ${((Date.now() - began) / 1000).toFixed(1)} s`;
  };
  const command = promisify(execFile).bind(null, 'target/debug/headgatectl', ['agents', '--absent', '-o', 'json', ...connection], { cwd: ROOT });
  const text = number ? page.getByRole('group', { name: /Exceptions/ }).getByText(`${number} without an agent`) :
    page.locator('h1', { hasText: `All ${FLEET} Nodes forward what the API says` });
  const answers = await Promise.all([
    seconds('page', () => text.isVisible()),
    // On a busy machine, a replica may not answer the command in time.
    seconds('headgatectl agents', () =>
      command().then(({ stdout }) => JSON.parse(stdout).length === number, () => false)),
    seconds('metric', async () => {
      // A replica of the tests has its page of metrics at the same number of port.
      const metrics = await (await fetch(`http://127.0.0.1:${new URL(server).port}/metrics`)).text();
      const counts = [...metrics.matchAll(/^headgate_control_plane_nodes_absent\{.*\} (\d+)$/gm)].map(([, count]) => Number(count));
      assert.ok(counts.length > 0, metrics);
      return Math.max(...counts) === number;
    }),
  ]);
  console.log(`${number} of ${FLEET} without an agent: ${answers.join(', ')}`);
}

// Inside the network of the simulated fleet.
async function real({ server, ca, cert, key }) {
  const connection = ['--server', server, '--tls-ca', ca, '--tls-cert', cert, '--tls-key', key, '--tls-server-name', 'control-plane'];
  const dashboard = run('target/debug/headgatectl', ['dashboard', ...connection], { stdio: ['ignore', 'pipe', 'inherit'] });
  const url = await line(dashboard, /^http:/);
  const browser = await launch();
  try {
    const page = await open(browser, url);
    if (FLEET >= 5000) {
      await page.locator('h1', { hasText: TRUTH }).waitFor();
      await inWords(page, UNWELL);
    } else {
      await page.locator('h1', { hasText: `All ${FLEET} Nodes forward what the API says` }).waitFor();
      process.send('suspend 1');
      await absent(page, connection, server, 1);
      process.send('resume 1');
      await absent(page, connection, server, 0);
    }
    await page.locator('#changes-list tbody tr').first().waitFor();
    await page.locator('#services').scrollIntoViewIfNeeded();
    await page.locator('#services-list tbody button').first().click();
    await page.locator('#drawer', { hasText: 'Nodes have its present state' }).or(page.locator('#drawer', { hasText: 'Endpoints' })).first().waitFor();
    await page.locator('#drawer-close').click();
    await page.locator('#ask-form').getByText('Wait', { exact: true }).click();
    await page.locator('#ask-fields input[name=service]').fill('bench/service-00000');
    // Only of a large fleet, some Nodes never have it.
    await page.locator('#ask-fields input[name=timeout]').fill(FLEET >= 5000 ? '2s' : '30s');
    await page.locator('#ask-form button.main').click();
    await page.locator('#ask-answer', { hasText: FLEET >= 5000 ? 'have programmed it' : 'nodes have programmed it' }).waitFor();
    await picture(page, `real-${FLEET}`, { fullPage: true });
    await isAccessible(page, `the real dashboard, ${FLEET} Nodes`);
    await guarded(browser, url);
    await measure(page, FLEET >= 5000 ? 30 : 8, FLEET >= 5000 ? use(page) : async () => {});
    await close(page);
  } finally {
    await browser.close();
    dashboard.kill('SIGTERM');
  }
}

async function withFleet() {
  const sizes = FLEET >= 5000 ? ['--services', '10000', '--endpoints', '5', '--rate', '20', '--unwell'] : [];
  const fleet = run('target/debug/page', ['--agents', String(FLEET), ...sizes], { stdio: ['pipe', 'pipe', 'inherit'] });
  const given = await line(fleet, /^\{/);
  const inside = run('ip', ['netns', 'exec', JSON.parse(given).namespace, process.execPath, fileURLToPath(import.meta.url), given],
    { stdio: ['ignore', 'inherit', 'inherit', 'ipc'] });
  inside.on('message', (text) => fleet.stdin.write(`${text}\n`));
  const code = await new Promise((done) => { inside.once('exit', done); });
  const ended = new Promise((done) => { fleet.once('exit', done); });
  fleet.stdin.end();
  await ended;
  assert.equal(code, 0, 'the tests with the real dashboard failed');
}

const given = process.argv[2];
// A guard against hanging.
const guard = setTimeout(() => { console.error('page-test takes too long'); stop(1); }, FLEET >= 5000 ? 1_200_000 : 600_000);
function stop(code) {
  for (const child of children) child.kill('SIGTERM');
  process.exit(code);
}
process.on('SIGTERM', () => stop(1));
try {
  if (given) {
    await real(JSON.parse(given));
  } else {
    if (process.env.ONLY !== 'real') {
      const browser = await launch();
      await alone(browser).finally(() => browser.close());
    }
    if (process.env.ONLY !== 'alone') await withFleet();
    console.log('the page passes its tests');
  }
  clearTimeout(guard);
  stop(0);
} catch (error) {
  console.error(error);
  stop(1);
}
