// One card per job: its state on top, then graphs, groups and ranks, incidents and timeline.
const PAGE_ROWS = 100, SEARCHED_FROM = 9, CALM_FROM = 32, OPEN_RANKS = matchMedia('(max-width: 720px)').matches ? 0 : 32;
const TILES = [
  ['Step', (job, card) => [card.maxStep]],
  ['Participants', job => [count(job.members, isTraining), `of ${job.members.length}`]],
  ['Ranks', job => [job.ranks.length || '–', describeRanks(job.ranks)]],
  ['Discarded steps', (job, card) => card.pace ? [card.pace.discards, card.pace.discards ? 'summed over groups' : ''] : ['–']],
  ['Restarts', (job, card) => restartsOf(card.runs)],
  ['Quorum age', job => [job.quorum_id ? duration(job.quorum_age_s) : '–', job.quorum_id ? `quorum ${shortIds(job.quorum_id)}` : '', `quorum ${job.quorum_id}`]],
];
const INTERNALS = [
  ['Verdict', job => [job.verdict.replaceAll('_', ' ')]],
  ['Phase', job => [job.phase, '', PHASE_HINTS[job.phase]]],
  ['Quorums formed', job => [job.quorums_formed]],
  ['Rounds', job => [job.rounds]],
  ['Sessions', job => [job.sessions]],
  ['Recalls', job => [job.recalls]],
  ['Revokes', job => [job.revokes]],
];
const RUN_TILES = [
  ['Generation', (job, card) => [card.groups.map(run => run.generation ?? '–').join(', ')]],
  ['Active', (job, card) => [sum(card.groups, run => run.active)]],
  ['Spares', (job, card) => [sum(card.groups, run => run.spares)]],
  ['Step', (job, card) => [card.maxStep]],
  ['Ranks', job => [job.ranks.length, describeRanks(job.ranks)]],
  ['Restarts', (job, card) => [sum(card.groups, run => run.restarts)]],
];
const jobs = new Map();
const isTraining = member => member.is_participant && member.state !== 'expired';
const sum = (list, value) => list.reduce((total, item) => total + value(item), 0);

function describeRanks(ranks) {
  const worth = RANK_STATES.slice(0, 3).map(state => [count(ranks, rank => rank.state === state), state]);
  return worth.filter(([number]) => number).map(([number, state]) => `${number} ${state}`).join(', ');
}

// By supervisors, with what is left of the smallest budget; null if there are none.
function restartsOf(runs) {
  const known = runs.flatMap(run => run.supervisors).filter(({is_connected}) => is_connected).map(({last}) => last);
  return known.length ? [sum(known, last => last.restarts), `${Math.min(...known.map(last => last.restarts_left))} left`] : null;
}

// -- a card

function makeJob(name) {
  const section = find('job').content.cloneNode(true).firstElementChild;
  const card = {
    section, name, groups: [], runs: [], pace: null, rows: new Map(), search: '', states: new Set(), sort: null, falling: false, limit: PAGE_ROWS,
    entries: ENTRIES, stripAt: 0, opened: new Set(), closed: new Set(), allRanks: false,
  };
  const sort = section.querySelector('.sort select');
  for (const column of COLUMNS) makeTitle(card, column, sort);
  sort.addEventListener('change', () => sortBy(card, COLUMNS.find(column => column.key === sort.value), false));
  section.querySelector('input').addEventListener('input', event => {
    card.search = event.target.value.trim().toLowerCase();
    showGroups(card);
  });
  section.querySelector('.groups .more').addEventListener('click', () => {
    if (isCalm(card)) card.showsAll = true;
    else card.limit += 5 * PAGE_ROWS;
    showGroups(card);
  });
  section.querySelector('.timeline .more').addEventListener('click', () => {
    card.entries = Infinity;
    showTimeline(card, card.job.timeline, card.now_s);
  });
  section.querySelector('.all').addEventListener('click', () => {
    card.allRanks = !hasOpenRanks(card, null);
    card.opened.clear();
    card.closed.clear();
    card.hasChosen = true;
    showGroups(card);
  });
  find('runs').before(section);
  return card;
}

function makeTitle(card, column, sort) {
  const title = add(card.section.querySelector('thead tr'), 'th', `${column.key} ${column.number ? 'number' : ''}`);
  title.scope = 'col';
  if (!column.order) return void (title.ariaLabel = 'Act');
  const button = add(title, 'button'), option = add(sort, 'option');
  button.type = 'button';
  button.textContent = option.textContent = column.title;
  option.value = column.key;
  button.title = column.hint || '';
  column.number && (title.title = button.title);
  button.addEventListener('click', () => sortBy(card, column, card.sort === column && !card.falling));
}

function sortBy(card, column, isFalling) {
  card.sort = column;
  card.falling = isFalling;
  const titles = card.section.querySelectorAll('th');
  for (const title of titles) title.removeAttribute('aria-sort');
  titles[COLUMNS.indexOf(column)].setAttribute('aria-sort', isFalling ? 'descending' : 'ascending');
  showGroups(card);
}

// -- what it shows

function showJob(card, job, runs, now_s, pace) {
  Object.assign(card, {job, runs, pace});
  card.now_s = now_s;
  joinRanks(card, job, runs);
  const isRun = card.groups.length > 0 && !job.members.length;
  card.maxStep = card.groups.reduce((most, m) => m.is_participant || isRun ? Math.max(most, m.step) : most, 0);
  const {section} = card;
  setText(section.querySelector('h2'), job.job);
  section.classList.toggle('has-runs', job.ranks.some(rank => rank.generation !== null || rank.state === 'spare'));
  showLead(card, job, pace, isRun);
  showActs(card);
  showTiles(section.querySelector('.tiles'), isRun ? RUN_TILES : TILES, job, card);
  showTiles(section.querySelector('.internals dl'), INTERNALS, job, card);
  setHidden(section.querySelector('.internals'), isRun);
  showGraphs(card, job, pace);
  showStates(card);
  showGroups(card);
  showIncidents(section.querySelector('.incidents'), job.incidents || []);
  showTimeline(card, job.timeline, now_s);
}

// Ranks of a run that belong to no replica group are listed below the run.
function joinRanks(card, job, runs) {
  const groups = new Map(job.members.map(member => [member.replica_id, member]));
  for (const run of runs) if (!groups.has(run.run)) groups.set(run.run, makeRun(run));
  for (const group of groups.values()) group.ranks = [];
  for (const rank of job.ranks) {
    const group = groups.get(rank.replica_id);
    rank.is_of_run = Boolean(group?.is_run);
    group?.ranks.push(rank);
  }
  card.groups = [...groups.values()].filter(group => !group.is_run || group.ranks.length);
  for (const group of card.groups) {
    group.ranks.sort((a, b) => a.group_rank - b.group_rank);
    if (group.is_run) group.step = group.ranks.reduce((most, rank) => rank.state === 'lost' ? most : Math.max(most, rank.step), 0);
  }
}

function makeRun(run) {
  return {
    replica_id: run.run, is_run: true, state: run.verdict, generation: run.counters.number < 0 ? null : run.counters.number,
    world_size: run.ranks.length, active: run.slots.length, spares: count(run.ranks, rank => rank.state === 'spare'),
    restarts: run.counters.job_restarts, step: 0, heartbeat_age_s: run.ranks.reduce((most, rank) => rank.state === 'lost' ? most : Math.max(most, rank.beat_age_s), 0),
    is_participant: false, commit_failures: 0, address: '', store_address: '', start: '',
  };
}

function showTiles(list, tiles, job, card) {
  const known = tiles.map(([title, values]) => [title, values(job, card)]).filter(([, values]) => values);
  trim(list, known.length);
  known.forEach(([title, [value, note = '', hint = '']], place) => {
    const tile = child(list, 'div', place);
    setTitle(tile, hint);
    setText(child(tile, 'dt', 0), title);
    const line = child(tile, 'dd', 1);
    setText(child(line, 'span', 0), value);
    setText(child(line, 'small', 1), note && ` ${note}`);
  });
}

function showStates(card) {
  const tools = card.section.querySelector('.states'), counts = new Map();
  for (const member of card.groups) counts.set(member.state, (counts.get(member.state) || 0) + 1);
  for (const state of [...STATES].reverse()) {
    const button = tools.querySelector(`button[name=${state}]`) || makeState(card, tools, state);
    const number = counts.get(state) || 0;
    setText(button, state === 'participant' ? plural(number, state) : `${number} ${nameOf(state)}`);
    setHidden(button, !counts.has(state) && !card.states.has(state));
    button.setAttribute('aria-pressed', card.states.has(state));
  }
  setHidden(card.section.querySelector('input'), card.groups.length < SEARCHED_FROM && !card.search);
}

function makeState(card, tools, state) {
  const button = add(tools, 'button', `pill ${STATE_TONES[state]}`);
  button.type = 'button';
  button.name = state;
  button.title = `${STATE_HINTS[state]} (press to show only these)`;
  button.addEventListener('click', () => {
    card.states.delete(state) || card.states.add(state);
    showStates(card);
    showGroups(card);
  });
  return button;
}

// -- which groups, in which order

// Many groups: only those that need a look, until the operator asks for others.
const isCalm = card => card.groups.length > CALM_FROM && !card.showsAll && !card.search && !card.states.size && !card.sort;
const isWell = member => member.state === 'participant' && member.commit_failures === 0 && badness(member) >= STATES.indexOf('participant');

function isLike(member, search) {
  const words = [member.replica_id, member.address, member.state, member.start];
  for (const rank of member.ranks) words.push(rank.host, rank.state, rank.phase, rank.waits_for);
  return words.join(' ').toLowerCase().includes(search);
}

function chosenMembers(card) {
  const calm = isCalm(card);
  const fits = m => (!card.states.size || card.states.has(m.state)) && (!card.search || isLike(m, card.search)) && !(calm && isWell(m));
  const members = card.groups.filter(fits);
  // If not all fit, those that need a look come first.
  const column = card.sort || COLUMNS[members.length > card.limit ? 1 : 0];
  const sign = card.falling ? -1 : 1;
  return members.sort((a, b) => sign * column.order(a, b) || byName(a, b));
}

function hasOpenRanks(card, member) {
  const byDefault = card.hasChosen ? card.allRanks : card.job.ranks.length <= OPEN_RANKS;
  return member === null ? byDefault
    : member.ranks.length > 0 && (card.opened.has(member.replica_id) || byDefault && !card.closed.has(member.replica_id));
}

function toggleRanks(card, name) {
  const member = card.groups.find(member => member.replica_id === name);
  if (!member) return;
  const isOpen = hasOpenRanks(card, member);
  (isOpen ? card.opened : card.closed).delete(name);
  (isOpen ? card.closed : card.opened).add(name);
  showGroups(card);
}

function showGroups(card) {
  const members = chosenMembers(card), shown = members.slice(0, card.limit), wanted = [];
  for (const member of shown) {
    wanted.push({key: member.replica_id, item: member, isRank: false});
    if (!hasOpenRanks(card, member)) continue;
    for (const rank of member.ranks) wanted.push({key: `${rank.replica_id} ${rank.group_rank}`, item: rank, isRank: true});
  }
  showRows(card, wanted);
  const {section} = card, more = section.querySelector('.groups .more');
  const calm = isCalm(card), left = (calm ? card.groups.length : members.length) - shown.length;
  setHidden(more, left === 0);
  setText(more, calm ? `${plural(left, 'healthy group')}: show` : `${plural(left, 'more replica group')}: show more`);
  setHidden(section.querySelector('.groups > .none'), members.length > 0 || !card.groups.length || calm);
  showHeat(section.querySelector('.heat'), card);
  const all = section.querySelector('.all');
  setText(all, hasOpenRanks(card, null) ? 'Hide ranks' : 'Show ranks');
  setHidden(all, !card.job.ranks.length);
  const why = section.querySelector('.mayNotAct');
  setHidden(why, control.may_act || !control.why);
  setText(why, `No actions from here: ${control.why}`);
}

// One square per group, if there are many.
function showHeat(heat, card) {
  const groups = card.groups.length > CALM_FROM ? [...card.groups].sort(byName) : [];
  trim(heat, groups.length);
  groups.forEach((member, place) => {
    const square = child(heat, 'i', place);
    setClass(square, STATE_TONES[member.state] || 'idle');
    setTitle(square, `${member.replica_id}: ${nameOf(member.state)}`);
  });
}
