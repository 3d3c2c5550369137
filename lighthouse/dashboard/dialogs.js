// What an operator does, each act confirmed; and the evidence of an incident.
let control = {may_act: false, may_view: true, why: '', csrf: ''}, asked = null, wasShown = true, doneUntil = 0;

async function askControl() {
  const answer = await fetch('control', {cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!answer.ok) return;
  control = await answer.json();
  setHidden(find('signIn'), control.may_act || !control.may_view);
  setHidden(find('signedOut'), control.may_view);
  if (!control.may_view && wasShown !== control.may_view) askToSignIn();
  wasShown = control.may_view;
  showSilence();
  for (const card of jobs.values()) { showGroups(card); showActs(card); }
}

async function reasonOf(answer) {
  try {
    return (await answer.json()).error || `HTTP ${answer.status}`;
  } catch {
    return `HTTP ${answer.status} ${answer.statusText}`;
  }
}

function showError(node, text) {
  setText(node, text);
  setHidden(node, !text);
}

// -- acts

const DONE_MS = 20000, ACTS_WITHIN_MS = 15000;
const isLastAlive = job => count(jobs.get(job).job.members, member => member.state !== 'expired') === 1;
const ACTS = {
  kill: {
    title: ({replica_id}) => `Kill ${replica_id}`, tone: 'danger', has_reason: true,
    what: ({job, replica_id}) => `Every rank of ${replica_id} in job ${job} ends at once, and what only it holds is lost. `
      + (isLastAlive(job) ? 'It is the last live group of the job: training ends.' : 'The others repeat their step without it. If something starts it again, it heals from a peer.'),
    done: ({replica_id}) => `${replica_id} was killed.`, failed: ({replica_id}) => `${replica_id} was not killed`,
  },
  drain: {
    title: ({replica_id}) => `Drain ${replica_id}`, tone: 'primary', has_reason: true,
    what: ({job, replica_id}) => `${replica_id} of job ${job} finishes its step and leaves. The others go on without it and lose no step.`,
    done: ({replica_id}) => `${replica_id} was asked to drain: it finishes its step and leaves.`, failed: ({replica_id}) => `${replica_id} was not asked to drain`,
  },
  stop: {
    title: ({run}) => `Stop run ${run}`, tone: 'danger', has_reason: true,
    what: ({job, run}) => `The supervisors of run ${run} of job ${job} end their ranks on all hosts and restart nothing. The stop holds until the run `
      + 'is resumed, also when the lighthouse restarts.',
    done: ({run}) => `Run ${run} is stopped.`, failed: ({run}) => `Run ${run} was not stopped`,
  },
  resume: {
    title: ({run}) => `Resume run ${run}`, tone: 'primary',
    what: ({job, run}) => `The stop of run ${run} of job ${job} is lifted, and excluded hosts may come again. Supervisors that have ended must be started again.`,
    done: ({run}) => `Run ${run} is resumed.`, failed: ({run}) => `Run ${run} was not resumed`,
  },
  stacks: {
    title: () => 'Take stacks', tone: 'primary',
    what: ({job}) => `Every rank of job ${job}'s quorum is asked what it does now: stacks, collectives, process, last output. No rank is interrupted.`,
    done: () => '', failed: () => 'No stacks',
  },
};

function askToAct(act, order) {
  asked = {act, order};
  const words = ACTS[act];
  setText(find('actTitle'), `${words.title(order)}?`);
  setText(find('actWhat'), words.what(order));
  setText(find('actNow'), words.title(order));
  setClass(find('actNow'), words.tone);
  setHidden(find('actWhy'), !words.has_reason);
  find('actReason').value = '';
  find('actNow').disabled = false;
  showError(find('actError'), '');
  find('act').showModal();
}

async function actNow() {
  const {act, order} = asked, words = ACTS[act], body = {...order, reason: find('actReason').value.trim()};
  find('actNow').disabled = true;
  showError(find('actError'), '');
  try {
    await askControl();
    const headers = {'Content-Type': 'application/json', 'X-CSRF-Token': control.csrf};
    const answer = await fetch(act, {method: 'POST', headers, body: JSON.stringify(body), signal: AbortSignal.timeout(ACTS_WITHIN_MS)});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    find('act').close('done');
    if (act === 'stacks') showStacks(order, await answer.json());
    else showDone(words.done(order));
  } catch (error) {
    showError(find('actError'), `${words.failed(order)}: ${error.message}`);
  }
  find('actNow').disabled = false;
}

function showDone(text) {
  setText(find('done'), text);
  setHidden(find('done'), false);
  doneUntil = Date.now() + DONE_MS;
}

// The acts on all of a job; those on a group are in its row.
function showActs(card) {
  const runs = control.may_act ? card.runs : [], list = card.section.querySelector('.acts');
  const wanted = control.may_act && card.job.ranks.length ? [['stacks', {job: card.name}]] : [];
  for (const {run, stop, excluded, verdict} of runs) {
    if (stop || excluded.length) wanted.push(['resume', {job: card.name, run}]);
    if (!stop && verdict !== 'completed') wanted.push(['stop', {job: card.name, run}]);
  }
  trim(list, wanted.length);
  wanted.forEach(([act, order], place) => {
    const button = child(list, 'button', place);
    button.type = 'button';
    setClass(button, 'quiet');
    setText(button, ACTS[act].title(order));
    button.onclick = () => askToAct(act, order);
  });
}

find('actNow').addEventListener('click', actNow);
find('actReason').addEventListener('keydown', event => {
  if (event.key === 'Enter') event.preventDefault();  // neither cancels nor acts by accident
});

// -- login

function askToSignIn() {
  find('loginToken').value = '';
  showError(find('loginError'), '');
  find('login').showModal();
}

async function signIn() {
  find('loginNow').disabled = true;
  try {
    const headers = {'Content-Type': 'application/json'}, body = JSON.stringify({token: find('loginToken').value.trim()});
    const answer = await fetch('login', {method: 'POST', headers, body, signal: AbortSignal.timeout(15000)});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    find('login').close('signed in');
    find('loginToken').value = '';
    await askControl();
    connect();
  } catch (error) {
    showError(find('loginError'), error.message);
  }
  find('loginNow').disabled = false;
}

for (const name of ['signIn', 'signInHere']) find(name).addEventListener('click', askToSignIn);
find('loginNow').addEventListener('click', signIn);
find('loginToken').addEventListener('keydown', event => {
  if (event.key === 'Enter') { event.preventDefault(); signIn(); }
});

// -- evidence

function openEvidence(title, raw) {
  setText(find('evidenceTitle'), title);
  setText(find('evidenceText'), '');
  setHidden(find('evidenceRaw'), !raw);
  find('evidenceRaw').href = raw;
  find('evidenceRanks').replaceChildren();
  showError(find('evidenceError'), '');
  find('evidence').showModal();
}

function showStacks({job}, gathered) {
  openEvidence(`Job ${job} at ${clock(Date.now())}`, '');
  fillEvidence({text: '', ...gathered});
}

async function showEvidence(event, id) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  openEvidence(`Incident ${id}`, event.currentTarget.href);
  try {
    const answer = await fetch(find('evidenceRaw').href, {cache: 'no-store', signal: AbortSignal.timeout(15000)});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    fillEvidence(await answer.json());
  } catch (error) {
    showError(find('evidenceError'), error.message);
  }
}

function fillEvidence(incident) {
  setText(find('evidenceText'), [incident.text, ...incident.missing].filter(Boolean).join('; '));
  const list = find('evidenceRanks');
  if (!incident.evidence.length) setText(add(list, 'p', 'soft'), 'No evidence was taken.');
  incident.evidence.forEach((rank, place) => addEvidence(list, rank, place === 0));
}

function addEvidence(list, rank, isOpen) {
  const details = add(list, 'details');
  details.open = isOpen;
  setText(add(details, 'summary'), [`${rank.replica_id}/${rank.group_rank}`, rank.host, rank.pid && `pid ${rank.pid}`].filter(Boolean).join(' · '));
  for (const reason of rank.missing) setText(add(details, 'p', 'soft'), `missing: ${reason}`);
  const parts = [['Stacks, the main thread first', threads(rank.stacks)], ['Collectives, the newest last', flights(rank.flight_recorder)], ['Process', rank.process],
    ['Last output', rank.output.join('\n')]];
  for (const [title, text] of parts) {
    if (!text) continue;
    setText(add(details, 'h3'), title);
    const block = add(details, 'pre');
    block.tabIndex = 0;
    setText(block, text);
  }
}

// faulthandler has the main thread last.
const threads = stacks => stacks.trim().split('\n\n').reverse().join('\n\n');

function flights(text) {
  try {
    return JSON.parse(text).map(flight).join('\n');
  } catch {
    return text;
  }
}

// As `lighthouse stacks` has it. Gloo leaves the state at scheduled; retired is over.
function flight(entry) {
  if (typeof entry !== 'object' || entry === null) return String(entry);
  const sizes = (entry.input_sizes || []).map(size => size.join('x') || 'scalar').join(' ');
  const what = [entry.seq, entry.operation, sizes].filter(part => part !== undefined && part !== '').join(' ');
  const since = typeof entry.age_s === 'number' ? `, ${duration(entry.age_s)} ago` : '';
  return `${what}${since}: ${entry.retired ? 'over' : entry.state || 'no state'} (group ${entry.group ?? '?'})`;
}

find('evidenceClose').addEventListener('click', () => find('evidence').close());
