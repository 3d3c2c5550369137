// The confirmation of a kill, and the evidence of an incident.
const TOKEN_HEADER = 'lighthouse-control-token';
let control = {may_kill: false, takes_token: false, why: '', csrf: ''};
let token = '', asked = null;

async function askControl() {
  const answer = await fetch('control', {cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!answer.ok) return;
  control = await answer.json();
  for (const card of jobs.values()) showGroups(card);
}

function tokenHeader() {
  return token ? {[TOKEN_HEADER]: token} : {};
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

// -- kill

function askToKill(job, replica_id) {
  asked = {job, replica_id};
  setText(find('killTitle'), `Kill ${replica_id}?`);
  setText(find('killWhat'), `Every rank of ${replica_id} in job ${job} ends at once, and what only it holds is lost. The others repeat `
    + 'their step without it. If something starts it again, it heals from a peer.');
  setText(find('killNow'), `Kill ${replica_id}`);
  setHidden(find('killTokenLabel'), control.may_kill);
  find('killReason').value = '';
  find('killToken').value = token;
  find('killNow').disabled = false;
  showError(find('killError'), '');
  find('kill').showModal();
}

async function kill() {
  const order = {...asked, reason: find('killReason').value.trim()};
  token = find('killToken').value.trim();
  find('killNow').disabled = true;
  showError(find('killError'), '');
  try {
    await askControl();
    const headers = {'Content-Type': 'application/json', 'X-CSRF-Token': control.csrf, ...tokenHeader()};
    const answer = await fetch('kill', {method: 'POST', headers, body: JSON.stringify(order), signal: AbortSignal.timeout(15000)});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    find('kill').close('killed');
  } catch (error) {
    showError(find('killError'), `${order.replica_id} was not killed: ${error.message}`);
  }
  find('killNow').disabled = false;
}

find('killNow').addEventListener('click', kill);
for (const name of ['killReason', 'killToken']) {
  find(name).addEventListener('keydown', event => {
    if (event.key === 'Enter') event.preventDefault();  // neither cancels nor kills by accident
  });
}

// -- evidence

async function showEvidence(event, id) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  setText(find('evidenceTitle'), `Incident ${id}`);
  setText(find('evidenceText'), '');
  find('evidenceRaw').href = event.currentTarget.href;
  find('evidenceRanks').replaceChildren();
  showError(find('evidenceError'), '');
  find('evidence').showModal();
  try {
    const answer = await fetch(find('evidenceRaw').href, {cache: 'no-store', headers: tokenHeader(), signal: AbortSignal.timeout(15000)});
    if (!answer.ok) throw new Error(await reasonOf(answer));
    fillEvidence(await answer.json());
  } catch (error) {
    showError(find('evidenceError'), error.message);
  }
}

function fillEvidence(incident) {
  setText(find('evidenceText'), [incident.text, ...incident.missing].join('; '));
  const list = find('evidenceRanks');
  if (!incident.evidence.length) setText(add(list, 'p', 'soft'), 'No evidence was taken.');
  incident.evidence.forEach((rank, place) => addEvidence(list, rank, place === 0));
}

function addEvidence(list, rank, isOpen) {
  const details = add(list, 'details');
  details.open = isOpen;
  setText(add(details, 'summary'), [`${rank.replica_id}/${rank.group_rank}`, rank.host, rank.pid && `pid ${rank.pid}`].filter(Boolean).join(' · '));
  for (const reason of rank.missing) setText(add(details, 'p', 'soft'), `missing: ${reason}`);
  const parts = [['Stacks', rank.stacks], ['Collectives, the newest last', flights(rank.flight_recorder)], ['Process', rank.process],
    ['Last output', rank.output.join('\n')]];
  for (const [title, text] of parts) {
    if (!text) continue;
    setText(add(details, 'h3'), title);
    const block = add(details, 'pre');
    block.tabIndex = 0;
    setText(block, text);
  }
}

function flights(text) {
  try {
    return JSON.parse(text).map(entry => JSON.stringify(entry)).join('\n');
  } catch {
    return text;
  }
}

find('evidenceClose').addEventListener('click', () => find('evidence').close());
