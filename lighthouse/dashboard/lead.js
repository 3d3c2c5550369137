// What matters first, in words: does it train, how fast, what was lost, which group is behind. And the same for the title.
const HEALS_SAID = 4, OPEN_FOR_S = 600;  // an incident that is not over by then will never be
const INCIDENT_WORDS = {
  loss: 'lost', divergence: 'in another state than its peers', not_applied: 'without a step that it committed',
  restart: 'restarted', exit: 'gone: its process ended',
};

const groupsOf = names => [...new Set(names.map(name => name.replace(/\/\d+$/, '')))].sort(compare);
const listed = names => names.slice(0, NAMES).join(', ') + (names.length > NAMES ? ` and ${names.length - NAMES} more` : '');
const percent = ratio => `${(100 * ratio).toFixed(1)} %`;

function speed(steps_per_s) {
  return steps_per_s >= 1 ? `${figure(steps_per_s)} steps/s` : steps_per_s > 0 ? `${duration(1 / steps_per_s)} a step` : 'no step yet';
}

// Empty: nothing is wrong.
function troubleOf(job, now_s) {
  const behind = groupsOf(job.ranks.filter(rank => rank.state === 'behind').map(rank => rank.replica_id));
  if (job.stall) return behind.length ? said(behind, 'behind') : 'nothing moves';
  const training = new Set(job.members.filter(isTraining).map(member => member.replica_id));
  for (const incident of job.incidents || []) {
    if (now_s - incident.opened_unix_s > OPEN_FOR_S || incident.kind === 'stall') continue;
    const suspects = groupsOf(incident.suspects), away = suspects.filter(name => !training.has(name));
    if (incident.kind === 'loss' ? away.length : !isOver(incident)) {
      return said(incident.kind === 'loss' ? away : suspects, INCIDENT_WORDS[incident.kind], incident.kind);
    }
  }
  return job.members.length && VERDICT_TONES[job.verdict] === 'bad' ? job.verdict.replaceAll('_', ' ') : '';
}

function said(groups, word, otherwise = '') {
  if (!groups.length) return otherwise.replaceAll('_', ' ');
  const noun = /^group/i.test(groups[0]) ? '' : groups.length > 1 ? 'groups ' : 'group ';
  return `${noun}${listed(groups)} ${groups.length > 1 ? 'are' : 'is'} ${word}`;
}

function troubleOfAll(all, now_s) {
  const troubled = all.map(job => [job.job, troubleOf(job, now_s)]).filter(([, trouble]) => trouble);
  if (!troubled.length) return '';
  const [name, trouble] = troubled[0];
  return (all.length > 1 ? `${name}: ` : '') + trouble + (troubled.length > 1 ? ` and ${plural(troubled.length - 1, 'more job')}` : '');
}

// -- the line on top of a job

function showLead(card, job, pace, isRun) {
  const {section} = card, stall = section.querySelector('.stall'), lead = section.querySelector('.lead');
  setText(stall, job.stall && `Nothing moves for ${duration(job.stall_s)}: ${job.stall}`);
  setHidden(stall, !job.stall);
  const [training, alive] = sizes(card, pace, isRun), goesOn = training > 0 && alive > 0 && VERDICT_TONES[job.verdict] !== 'bad';
  const stopped = card.runs.find(run => run.stop), why = stopped ? `run ${stopped.run} is stopped: ${stopped.stop.reason}` : isRun ? STATE_HINTS[card.groups[0].state] : job.explanation;
  const awaited = goesOn ? holdingUp(job) : [];
  setText(lead, !goesOn ? `Not training: ${why}.` : awaited.length ? `Waiting for ${listed(awaited)} to heal, at step ${card.maxStep}.`
    : trains(training, alive, pace, card.maxStep, isRun));
  setClass(lead, `lead ${!goesOn ? 'warn' : awaited.length ? 'busy' : ''}`);
  setHidden(lead, Boolean(job.stall));
  setText(section.querySelector('.lost'), [lost(job, pace, card.now_s), healing(job), late(card, job)].filter(Boolean).join(' '));
  const verdict = section.querySelector('.why');
  setText(verdict, isRun ? '' : job.explanation);
  setHidden(verdict, isRun || !goesOn || job.verdict === 'formed');
}

// How many train, of how many that live.
function sizes(card, pace, isRun) {
  if (pace) return [pace.training, pace.alive];
  if (isRun) return [card.groups[0].state === 'stands' ? sum(card.groups, run => run.active) : 0, sum(card.groups, run => run.world_size)];
  return [count(card.groups, isTraining), count(card.groups, member => member.state !== 'expired')];
}

function trains(training, alive, pace, step, isRun) {
  const at = pace && pace.steps_per_s !== null ? ` at ${speed(pace.steps_per_s)}` : '';
  return `${pace && pace.steps_per_s === 0 ? 'Waiting for a step' : `Training${at}`} with `
    + `${training === alive ? 'all ' : `${training} of `}${plural(alive, isRun ? 'rank' : 'live group')}, at step ${step}.`;
}

function lost(job, pace, now_s) {
  const loss = (job.incidents || []).find(({kind}) => kind === 'loss');
  const parts = [
    pace && pace.goodput !== null && `${percent(1 - pace.goodput)} of the groups' time`,
    pace && pace.discards > 0 && plural(pace.discards, 'discarded step'),
    loss && `${listed(loss.suspects)} ${duration(now_s - loss.opened_unix_s)} ago`
      + (loss.step_s === null ? ', with no step since' : `, which cost ${loss.step_s < 1 ? `${Math.round(1000 * loss.step_s)} ms` : duration(loss.step_s)}`),
  ].filter(Boolean);
  return parts.length ? `Lost: ${parts.join('; ')}.` : pace ? 'Nothing was lost.' : '';
}

// The groups that receive a state in the present step: the others wait for them.
function holdingUp(job) {
  const healing = new Set(job.members.filter(({state}) => state === 'healing').map(member => member.replica_id));
  return groupsOf(job.ranks.filter(rank => rank.phase === 'heal' && healing.has(rank.replica_id)).map(rank => rank.replica_id));
}

// How far each group is that heals, the longest heals first.
function healing(job) {
  const members = job.members.filter(({heal}) => heal).sort((a, b) => b.heal.seconds - a.heal.seconds);
  const words = members.slice(0, HEALS_SAID).map(member => `${member.replica_id} is ${member.heal.text}`);
  if (members.length > HEALS_SAID) words.push(`${plural(members.length - HEALS_SAID, 'more group')} healing`);
  return words.length ? `${words.join('; ')}.` : '';
}

function late(card, job) {
  const behind = job.ranks.filter(rank => rank.state === 'behind').map(rank => `${rank.replica_id}/${rank.group_rank}`).sort(compare);
  const told = new Set(job.members.filter(({heal}) => heal).map(member => member.replica_id));
  const heals = healsOf(job.timeline).filter(({name, to}) => to === null && !told.has(name)).map(({name}) => name);
  const parts = [behind.length && `behind ${listed(behind)}`, heals.length && `healing ${listed(heals)}`];
  for (const state of ['straggler', 'starting', 'down', 'timed_out', 'expired', 'idle']) {
    const names = card.groups.filter(member => member.state === state).map(member => member.replica_id).sort(compare);
    if (names.length) parts.push(`${state.replace('_', ' ')} ${listed(names)}`);
  }
  const words = parts.filter(Boolean).join('; ');
  return words && `${words[0].toUpperCase()}${words.slice(1)}.`;
}
