// Chromium for the tests of the page, and what every page must fulfil.
import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

const ROOT = fileURLToPath(new URL('../../', import.meta.url));
export const PICTURES = `${ROOT}target/page`;
const require = createRequire(`${ROOT}target/page/tools/`);
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
// The longest wait for anything. No test asserts on time.
export const LIMIT = 60_000;

export async function launch() {
  mkdirSync(PICTURES, { recursive: true });
  // Tests run as root in a network namespace, where Chromium's own sandbox does not start.
  const args = ['--no-sandbox', '--disable-background-networking', '--disable-component-update'];
  return require('playwright-core').chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args, timeout: LIMIT });
}

// Opens the page, and waits until it shows all Nodes.
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, reducedMotion: 'reduce', ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(LIMIT);
  page.faults = [];
  page.on('pageerror', (error) => page.faults.push(error.stack));
  page.on('console', (message) => { if (message.type() === 'error') page.faults.push(`${message.text()} ${message.location().url.split('?')[0]}`); });
  await page.goto(url);
  await page.waitForFunction(() => performance.getEntriesByName('first-view').length > 0);
  return page;
}

export async function close(page) {
  assert.deepEqual(page.faults, [], 'the page has errors');
  await page.context().close();
}

export async function isAccessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document));
  const found = violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html, failureSummary }) => `${html} ${failureSummary}`).join('\n')}`);
  assert.deepEqual(found, [], `axe finds faults: ${what}`);
  console.log(`axe finds nothing: ${what}`);
}

export const picture = (page, name, options) => page.screenshot({ path: `${PICTURES}/${name}.png`, ...options });

// Moves through the page with the keyboard alone.
export async function keyboard(page, isUnwell) {
  // A reload finds the token in the tab, and begins at the top.
  await page.reload();
  await page.waitForFunction(() => performance.getEntriesByName('first-view').length > 0);
  await page.keyboard.press('Tab');
  assert.equal(await page.evaluate(() => document.activeElement.className), 'skip');
  await page.keyboard.press('Enter');
  for (let tabs = 0; tabs < 10 && await page.evaluate(() => document.activeElement.id) !== 'board'; tabs += 1) await page.keyboard.press('Tab');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'board');
  const said = () => page.locator('#board-said').textContent();
  const before = await said();
  await page.keyboard.press('ArrowRight');
  assert.notEqual(await said(), before);
  if (isUnwell) {
    await page.keyboard.press('Home');
    await page.keyboard.press('n');
    assert.match(await said(), /, (failing|drift|no agent|behind)/);
  }
  const name = (await said()).split(',')[0];
  await page.keyboard.press('Enter');
  await page.locator('#drawer').waitFor({ state: 'visible' });
  assert.equal(await page.locator('#drawer-title').textContent(), name);
  await page.locator('#drawer dl').waitFor();
  await page.keyboard.press('Escape');
  await page.locator('#drawer').waitFor({ state: 'hidden' });
  assert.equal(await page.evaluate(() => document.activeElement.id), 'board');
  await page.locator('#services-search').focus();
  await page.keyboard.type('1');
  const row = page.locator('#services-list tbody button').first();
  await row.waitFor();
  await row.focus();
  await page.keyboard.press('Enter');
  await page.locator('#drawer h3', { hasText: 'What a Node does' }).waitFor();
  await page.keyboard.press('Escape');
  await page.locator('#services-search').fill('');
  console.log('the keyboard alone reaches the map, a card, the table and a Service');
}

// Bytes of the network, the longest task, and the longest answer to an interaction.
export async function measure(page, seconds, rest) {
  const session = await page.context().newCDPSession(page);
  let bytes = 0;
  session.on('Network.dataReceived', ({ encodedDataLength, dataLength }) => { bytes += encodedDataLength || dataLength; });
  await session.send('Network.enable');
  await session.send('Performance.enable');
  await page.evaluate(() => {
    globalThis.longest = { task: 0, interaction: 0, frame: 0 };
    new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => { longest.task = Math.max(longest.task, duration); })).observe({ type: 'longtask' });
    new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => { longest.interaction = Math.max(longest.interaction, duration); }))
      .observe({ type: 'event', durationThreshold: 16 });
    let before = performance.now();
    const frame = (now) => { longest.frame = Math.max(longest.frame, now - before); before = now; requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
  });
  await page.waitForTimeout(seconds * 1000);
  const quiet = { bytes, ...await page.evaluate(() => longest) };
  await page.evaluate(() => { longest.task = 0; longest.interaction = 0; longest.frame = 0; });
  await rest();
  const busy = await page.evaluate(() => longest);
  const { metrics } = await session.send('Performance.getMetrics');
  const heap = metrics.find(({ name }) => name === 'JSHeapUsedSize').value;
  const cdp = await page.context().browser().newBrowserCDPSession();
  const { processInfo } = await cdp.send('SystemInfo.getProcessInfo');
  const resident = (id) => Number(/RssAnon:\s+(\d+)/.exec(readFileSync(`/proc/${id}/status`, 'utf8'))?.[1] ?? 0) / 1024;
  const memory = Math.max(...processInfo.filter(({ type }) => type === 'renderer').map(({ id }) => resident(id)));
  const view = await page.evaluate(() => performance.getEntriesByName('first-view')[0].startTime);
  const minute = Math.round(quiet.bytes * 60 / seconds / 1000);
  console.log(`first view ${Math.round(view)} ms (goal 1,000) · tab ${Math.round(memory)} MB, of which scripts ${Math.round(heap / 1e6)} MB · ` +
    `${minute} KB a minute (goal 200) · longest frame ${Math.round(quiet.frame)} ms, longest task ${Math.round(quiet.task)} ms · ` +
    `while used: longest answer ${Math.round(busy.interaction)} ms (goal 100), longest task ${Math.round(busy.task)} ms`);
  assert.ok(minute <= 200, `${minute} KB a minute after loading`);
}
