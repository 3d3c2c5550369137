// Updates: by an event stream, or by polling if a proxy cuts the stream; and what the page shows if the lighthouse is silent.
const TICK_MS = 500, ASKED_AGAIN_MS = 2000, QUIET_MS = 4000, PATIENCE_MS = 5000, RECONNECT_MS = 15000, HIDDEN_MS = 15000;
const figures = {updates: 0, took_ms: 0, bytes: 0};  // for what measures this page
let source = null, connectedAt = 0, heardAt = 0, askedAt = 0, failingSince = 0, reason = '', way = '', fresh = null, trouble = '';

function show(status) {
  const beganAt = performance.now(), now_s = status.now_unix_s || Date.now() / 1000;
  setText(find('about'), `times in ${zone} · up ${duration(status.uptime_s)} · ${status.version}`);
  setText(find('port'), status.grpc_port || 29510);
  setHidden(find('insecure'), !status.insecure);
  const names = new Set(status.jobs.map(job => job.job));
  for (const [name, card] of jobs) if (!names.has(name)) { card.section.remove(); jobs.delete(name); }
  const paces = new Map(Object.entries(status.pace || {}));  // a job may have the name of a property of every object
  for (const job of status.jobs) {
    if (!jobs.has(job.job)) jobs.set(job.job, makeJob(job.job));
    const runs = (status.runs || []).filter(run => run.job === job.job);
    showJob(jobs.get(job.job), job, runs, now_s, paces.get(job.job) || null);
  }
  trouble = troubleOfAll(status.jobs, now_s);
  showRuns(status.runs || []);
  setHidden(find('empty'), status.jobs.length > 0 || !find('runs').hidden);
  figures.updates += 1;
  figures.took_ms = performance.now() - beganAt;
}

// -- updates; only the newest is shown

function heard(text, by) {
  heardAt = Date.now();
  failingSince = 0;
  way = by;
  const isFirst = fresh === null;
  fresh = text;
  if (document.hidden) showNewest();  // which has no animation frames
  else if (isFirst) requestAnimationFrame(showNewest);
}

function showNewest() {
  if (fresh === null) return;
  const text = fresh, beganAt = performance.now();
  fresh = null;
  figures.bytes = text.length;
  const status = JSON.parse(text);
  figures.parse_ms = performance.now() - beganAt;
  show(status);
  showSilence();
}

function failed(why) {
  failingSince = failingSince || Date.now();
  reason = why;
}

// -- by events

function connect() {
  disconnect();
  connectedAt = Date.now();
  const opened = source = new EventSource('events');
  opened.addEventListener('open', () => askControl().catch(() => {}));  // another process may have another token
  opened.addEventListener('status', event => heard(event.data, 'live'));
  opened.addEventListener('error', () => {
    if (opened === source && opened.readyState === EventSource.CLOSED) source = null;  // no stream is to be had
    ask();
  });
}

function disconnect() {
  if (source) source.close();
  source = null;
}

// -- by asking

async function ask() {
  if (Date.now() - askedAt < ASKED_AGAIN_MS) return;
  askedAt = Date.now();
  try {
    const answer = await fetch('status', {cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS)});
    if (answer.status === 403) askControl().catch(() => {});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    heard(await answer.text(), 'polling');
    if (!control.csrf) askControl().catch(() => {});
  } catch (error) {
    failed(error.message);
  }
  showSilence();
}

// -- silence

function showSilence() {
  const isSignedOut = !control.may_view, isSilent = failingSince > 0 && !isSignedOut, notice = find('silence');
  find('main').classList.toggle('stale', isSilent || isSignedOut);
  const word = isSilent ? 'no answer' : isSignedOut ? 'signed out' : way || 'connecting';
  setPill(find('live'), `pill ${isSignedOut ? 'idle' : isSilent ? 'bad' : way === 'live' ? 'good' : way ? 'busy' : 'idle'}`, word,
    way === 'polling' ? 'a proxy cuts the event stream; the page polls instead' : '');
  const wrong = isSilent ? 'no answer' : isSignedOut ? '' : trouble, title = wrong ? `(!) ${wrong} - Lighthouse` : 'Lighthouse';
  if (document.title !== title) document.title = title;
  if (isSilent) {
    const old = heardAt ? ` This page shows the state of ${clock(heardAt)}.` : '';
    const silent_s = duration((Date.now() - failingSince) / 1000);
    setText(notice.children[0], `No answer from the lighthouse since ${clock(failingSince)} (${silent_s}).${old}`);
    setText(notice.children[1], reason);
  }
  setHidden(notice, !isSilent);
}

function tick() {
  const now = Date.now();
  if (now > doneUntil) setHidden(find('done'), true);
  if (document.hidden) return void (now - askedAt > HIDDEN_MS && ask());
  if (now - heardAt > QUIET_MS && now - connectedAt > QUIET_MS || !source) ask();
  if (!source && now - connectedAt > RECONNECT_MS) connect();
  showSilence();
}

// A page in the background has no event stream; it polls for its title.
document.addEventListener('visibilitychange', () => document.hidden ? disconnect() : connect());
document.addEventListener('keydown', event => {
  const input = document.querySelector('.tools input:not([hidden])');
  if (event.key !== '/' || !input || event.target.closest('input, select, textarea, dialog')) return;
  event.preventDefault();
  input.focus();
});
window.lighthouseFigures = figures;
connect();
setInterval(tick, TICK_MS);
