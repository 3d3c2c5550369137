// The table of replica groups, and of their ranks below them.
const LATE_S = 2, OLD_S = 5;

const byName = (a, b) => compare(a.replica_id, b.replica_id);
const oldest = member => member.ranks.reduce((most, rank) => Math.max(most, rank.progress_age_s), 0);
const slowness = member => member.ranks.reduce((most, rank) => Math.max(most, rank.compute_ratio_1m ?? 0), 0);
// The worst rank of a group counts more than the group's state.
const badness = member => member.ranks.reduce((worst, rank) => Math.min(worst, RANK_STATES.indexOf(rank.state) - 2), 0) * 10
  + STATES.indexOf(member.state);
const COLUMNS = [
  {key: 'replica', title: 'Replica group', order: byName, group: fillReplica, rank: fillRank},
  {key: 'state', title: 'State', order: (a, b) => badness(a) - badness(b), group: fillState, rank: fillRankState},
  {key: 'phase', title: 'Doing', order: (a, b) => compare(doing(a), doing(b)), group: fillPhase, rank: fillRankPhase},
  {key: 'generation', title: 'Gen', number: true, hint: 'The last generation in which a rank of a run was active',
    order: (a, b) => (a.generation ?? -1) - (b.generation ?? -1), group: fillGeneration, rank: fillGeneration},
  {key: 'step', title: 'Step', number: true, order: (a, b) => a.step - b.step, group: fillStep, rank: fillRankStep},
  {key: 'beat age', title: 'Heartbeat', number: true, hint: 'Age of the newest heartbeat',
    order: (a, b) => a.heartbeat_age_s - b.heartbeat_age_s, group: fillBeat, rank: fillRankBeat},
  {key: 'progress age', title: 'Still', number: true, hint: 'Time since its slowest rank last moved',
    order: (a, b) => oldest(a) - oldest(b), group: fillProgress, rank: fillRankProgress},
  {key: 'compute', title: 'Compute', number: true, hint: 'Compute time over the median of its peers, in the last minute: 2.0x is half as fast',
    order: (a, b) => slowness(a) - slowness(b), group: fillCompute, rank: fillRankCompute},
  {key: 'failed', title: 'Discarded', hint: 'Steps discarded since the last commit', number: true,
    order: (a, b) => a.commit_failures - b.commit_failures, group: fillFailed, rank: () => {}},
  {key: 'act', title: '', group: fillAct, rank: () => {}},
];

// -- one group

function fillReplica(cell, member, card) {
  const name = child(cell, 'button', 0), note = child(cell, 'small', 1);
  if (!name.onclick) {
    name.type = 'button';
    name.onclick = () => toggleRanks(card, cell.parentNode.dataset.name);
  }
  setText(name, member.replica_id);
  name.disabled = !member.ranks.length;
  name.setAttribute('aria-expanded', String(hasOpenRanks(card, member)));
  const ranks = member.world_size ? plural(member.world_size, 'rank') : '';
  setText(note, [ranks, member.address.replace(/^https?:\/\//, ''), member.start].filter(Boolean).join(' · '));
  setTitle(note, [member.start && `start ${member.start}`, member.address && `manager ${member.address}`,
    member.store_address && `store ${member.store_address}`].filter(Boolean).join(', '));
}

function fillState(cell, member) {
  setPill(child(cell, 'span', 0), `pill ${STATE_TONES[member.state] || 'idle'}`, nameOf(member.state),
    (STATE_HINTS[member.state] || '') + (member.is_run ? '' : member.is_participant ? '; in the quorum' : '; not in the quorum'));
  const note = child(cell, 'small', 1), {preemption} = member;
  setClass(note, preemption ? 'kind warn' : '');
  setText(note, preemption ? ` ${endsIn(preemption)}` : '');
  setTitle(note, preemption ? `${preemption.host}: ${preemption.reason} (${preemption.source})` : '');
}

function endsIn({is_advice, left_s}) {
  return is_advice ? 'may end' : left_s === null ? 'ends soon' : `ends in ${duration(left_s)}`;
}

function doing(member) {
  if (member.heal) return member.heal.text;
  const words = [...new Set(member.ranks.map(rank => rank.is_inside ? rank.collective : rank.phase))];
  return words.slice(0, 2).join(', ') + (words.length > 2 ? ', …' : '');
}

function fillPhase(cell, member) {
  const bad = RANK_STATES.slice(0, 2).map(state => [count(member.ranks, rank => rank.state === state), state]).find(([n]) => n);
  setText(child(cell, 'span', 0), doing(member));
  const note = child(cell, 'small', 1);
  setClass(note, bad ? 'kind bad' : '');
  setText(note, bad ? ` ${plural(bad[0], 'rank')} ${bad[1]}` : '');
}

function fillGeneration(cell, item) {
  setText(child(cell, 'span', 0), item.generation ?? '');
}

function fillStep(cell, member, card) {
  const behind = card.maxStep - member.step;
  const lag = child(cell, 'small', 0);
  setText(lag, behind > 1 && member.address ? `−${behind} ` : '');
  setTitle(lag, 'steps behind the quorum');
  setText(child(cell, 'span', 1), member.step);
}

function fillBeat(cell, member) {
  fillAge(cell, 'beat', member.heartbeat_age_s, member.state === 'expired');
}

function fillAge(cell, key, age, isOver) {
  setClass(cell, `${key} age number ${age > OLD_S || isOver ? 'bad' : age > LATE_S ? 'warn' : ''}`);
  setText(child(cell, 'span', 0), duration(age));
}

function fillProgress(cell, member) {
  if (!member.ranks.length) return trim(cell, 0);
  const slowest = member.ranks.reduce((most, rank) => gravity(rank) > gravity(most) ? rank : most);
  fillShare(cell, slowest);
}

const share = rank => rank.limit_s ? Math.min(1, rank.progress_age_s / rank.limit_s) : 0;
const gravity = rank => 10 * (rank.state === 'behind') + 2 * (rank.state !== 'waiting') * share(rank) + share(rank);

// Steps take seconds: a shorter time without progress is noise. A rank that waits for others has no tone.
function fillShare(cell, rank) {
  if (rank.progress_age_s < OLD_S) {
    setClass(cell, 'progress age number');
    return trim(cell, 0);
  }
  const tone = rank.state === 'behind' ? 'bad' : rank.state === 'waiting' ? '' : share(rank) >= 1 ? 'bad' : share(rank) > .5 ? 'warn' : '';
  setClass(cell, `progress age number ${tone}`);
  setText(child(cell, 'span', 0), duration(rank.progress_age_s));
  const bar = child(cell, 'b', 1);
  setClass(bar, 'bar');
  const width = `${Math.round(20 * share(rank)) * 5}%`, fill = child(bar, 'i', 0);
  if (fill.style.width !== width) fill.style.width = width;
}

function fillFailed(cell, member) {
  setClass(cell, `failed number ${member.commit_failures ? 'bad' : 'zero'}`);
  setText(child(cell, 'span', 0), member.commit_failures);
}

function fillAct(cell, member, card) {
  ['drain', 'kill'].forEach((act, place) => {
    const button = child(cell, 'button', place);
    if (!button.onclick) {
      button.type = 'button';
      button.className = act;
      button.textContent = act === 'kill' ? 'Kill' : 'Drain';
      button.onclick = () => askToAct(act, {job: card.name, replica_id: cell.parentNode.dataset.name});
    }
    setHidden(button, member.is_run || member.state === 'expired' || !control.may_act);
    const label = `${button.textContent} ${member.replica_id}`;
    if (button.ariaLabel !== label) button.ariaLabel = label;
  });
}

// -- one rank

function fillRank(cell, rank) {
  setText(child(cell, 'span', 0), `${rank.is_of_run ? 'slot' : 'rank'} ${rank.group_rank}`);
  setText(child(cell, 'small', 1), ` ${[rank.host, rank.pid && `pid ${rank.pid}`].filter(Boolean).join(' · ')}`);
}

function fillRankState(cell, rank) {
  setPill(child(cell, 'span', 0), `pill ${RANK_TONES[rank.state] || 'idle'}`, rank.state, RANK_HINTS[rank.state] || '');
}

function fillRankPhase(cell, rank) {
  const ticks = rank.total === null ? (rank.done ? ` ${rank.done}` : '') : ` ${rank.done}/${rank.total}`;
  setText(child(cell, 'span', 0), `${rank.phase}${ticks}`);
  const where = rank.is_inside ? `in ${rank.collective}` : rank.waits_for ? `waits for ${rank.waits_for}` : rank.at;
  setText(child(cell, 'small', 1), where && ` ${where}`);
  setTitle(cell, `in ${rank.phase} for ${duration(rank.phase_s)}${rank.collective ? `; newest collective: ${rank.collective}` : ''}`);
}

function fillRatio(cell, ratio, isSlow, hint) {
  setClass(cell, `compute number ${ratio ? '' : 'zero'}`);
  setClass(child(cell, 'span', 0), isSlow ? 'kind bad' : '');
  setText(child(cell, 'span', 0), ratio ? `${ratio.toFixed(1)}x` : '');
  setTitle(cell, hint);
}

function fillCompute(cell, member) {
  fillRatio(cell, slowness(member), member.ranks.some(rank => rank.is_slow), 'of its slowest rank');
}

function fillRankCompute(cell, rank) {
  fillRatio(cell, rank.compute_ratio_1m, rank.is_slow,
    rank.compute_ratio_10m === null ? '' : `${rank.compute_ratio_10m.toFixed(1)}x in the last 10 minutes`);
}

function fillRankStep(cell, rank) {
  setText(child(cell, 'span', 0), rank.step);
  setTitle(cell, rank.compared ? `state compared with the peers at step ${rank.compared.step}` : '');
}

function fillRankBeat(cell, rank) {
  fillAge(cell, 'beat', rank.beat_age_s, rank.state === 'lost');
}

function fillRankProgress(cell, rank) {
  fillShare(cell, rank);
  setTitle(cell, rank.limit_s ? `called behind after ${duration(rank.limit_s)} without progress here` : '');
}

// -- rows

function makeRow(isRank) {
  const row = document.createElement('tr');
  for (const column of COLUMNS) {
    const cell = add(row, 'td', `${column.key} ${column.number ? 'number' : ''}`);
    cell.dataset.label = column.title;
  }
  row.isRank = isRank;
  return row;
}

function fillRow(row, item, card) {
  COLUMNS.forEach((column, place) => column[row.isRank ? 'rank' : 'group'](row.children[place], item, card));
}

// Reuses the rows by key and moves only those whose place has changed.
function showRows(card, wanted) {
  const body = card.section.querySelector('tbody'), rows = new Map();
  wanted.forEach(({key, item, isRank}, place) => {
    const row = card.rows.get(key) || makeRow(isRank);
    rows.set(key, row);
    row.dataset.name = item.replica_id;
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
    setClass(row, isRank ? 'rank' : item.state === 'expired' ? 'expired' : '');
    fillRow(row, item, card);
  });
  trim(body, wanted.length);
  card.rows = rows;
}
