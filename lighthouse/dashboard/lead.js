// The first lines of a job and the window's title: does it train, how fast, what was lost, which group is behind.
const HEALS_NAMED = 4, AWAY_NAMED = 3, OPEN_FOR_S = 600;  // older ones are no news, and some never end, because the lighthouse restarted
const INCIDENT_WORDS = {
  loss: 'lost', divergence: 'diverged from its peers', not_applied: 'missing a step that it committed',
  nonfinite: 'sending gradients that are not finite',
  slow: 'slower than its peers',
  chaos: 'the target of an injected fault',
  restart: 'restarted', exit: 'gone: its process ended',
};

const AWAY_STATES = ['straggler', 'starting', 'joined', 'down', 'timed_out', 'expired', 'idle'];

const distinct = names => [...new Set(names)].sort(compare);
const groupsOf = ({kind, suspects}) => distinct(['loss', 'not_applied', 'divergence'].includes(kind) ? suspects : suspects.map(name => name.replace(/\/\d+$/, '')));
const listed = names => names.slice(0, NAMES).join(', ') + (names.length > NAMES ? ` and ${names.length - NAMES} more` : '');
const percent = ratio => `${(100 * ratio).toFixed(1)} %`;

function speed(steps_per_s) {
  return steps_per_s >= 1 ? `${figure(steps_per_s)} steps/s` : steps_per_s > 0 ? `${duration(1 / steps_per_s)} a step` : 'no step yet';
}

// All groups of the job have finished: what was lost before is no trouble any more.
const hasEnded = job => Number.isInteger(job.ended_step);

// What is wrong with a job, for the title; empty if nothing is.
function troubleOf(job, now_s) {
  if (hasEnded(job)) return '';
  const behind = distinct(job.ranks.filter(rank => rank.state === 'behind').map(rank => rank.replica_id));
  if (job.stall) return behind.length ? said(behind, 'behind') : 'stalled';
  const training = new Set(job.members.filter(isTraining).map(member => member.replica_id));
  for (const incident of job.incidents || []) {
    if (now_s - incident.opened_unix_s > OPEN_FOR_S || incident.kind === 'stall') continue;
    const suspects = groupsOf(incident), away = suspects.filter(name => !training.has(name));
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
  setText(stall, job.stall && `No progress for ${duration(job.stall_s)}: ${job.stall}`);
  setHidden(stall, !job.stall);
  const [training, alive] = sizes(card, pace, isRun), ended = !isRun && hasEnded(job);
  const goesOn = !ended && training > 0 && alive > 0 && VERDICT_TONES[job.verdict] !== 'bad';
  const stopped = card.runs.find(run => run.stop), why = stopped ? `run ${stopped.run} is stopped: ${stopped.stop.reason}` : isRun ? STATE_HINTS[card.groups[0].state] : job.explanation;
  const awaited = goesOn ? holdingUp(job) : [];
  setText(lead, ended ? `${capital(job.explanation)}.` : !goesOn ? `Not training: ${why}.` : awaited.length ? `Waiting for ${listed(awaited)} to heal, at step ${card.maxStep}.`
    : trains(card, training, alive, pace, isRun));
  setClass(lead, `lead ${ended ? '' : !goesOn ? 'warn' : awaited.length ? 'busy' : ''}`);
  setHidden(lead, Boolean(job.stall));
  setText(section.querySelector('.lost'), [lost(card, job, pace), healing(job), late(card, job, goesOn && !awaited.length && !job.stall)].filter(Boolean).join(' '));
  const [word, tone] = headline(card, job, isRun, goesOn, awaited, pace);
  setPill(section.querySelector('.verdict'), `verdict pill ${tone}`, word);
  const verdict = section.querySelector('.why');
  setText(verdict, isRun ? '' : job.explanation);
  setHidden(verdict, isRun || !goesOn || job.verdict === 'formed');
}

// The state of a job in one word.
function headline(card, job, isRun, goesOn, awaited, pace) {
  if (job.stall) return ['Stalled', 'bad'];
  if (isRun) return [capital(nameOf(card.groups[0].state)), STATE_TONES[card.groups[0].state] || 'idle'];
  if (hasEnded(job)) return ['Ended', 'good'];
  if (job.members.length && job.members.every(member => member.state === 'expired')) return ['All groups lost', 'bad'];
  if (awaited.length) return [`Waiting for ${listed(awaited)}`, 'busy'];
  if (goesOn) return pace && pace.steps_per_s === 0 ? ['Waiting for a step', 'busy'] : ['Training', 'good'];
  if (job.members.length && job.members.every(member => ['starting', 'idle', 'joined'].includes(member.state))) return ['Starting', 'busy'];
  return ['Not training', VERDICT_TONES[job.verdict] || 'idle'];
}

const capital = text => text && text[0].toUpperCase() + text.slice(1);

// How many train, of how many that are alive.
function sizes(card, pace, isRun) {
  if (pace) return [pace.training, pace.alive];
  if (isRun) return [card.groups[0].state === 'stands' ? sum(card.groups, run => run.active) : 0, sum(card.groups, run => run.world_size)];
  return [count(card.groups, isTraining), count(card.groups, member => member.state !== 'expired')];
}

function trains(card, training, alive, pace, isRun) {
  const at = pace && pace.steps_per_s !== null ? ` at ${speed(pace.steps_per_s)}` : '';
  const all = isRun ? alive : Math.max(alive, card.groups.length), away = isRun ? '' : awayOf(card);
  return `${pace && pace.steps_per_s === 0 ? 'Waiting for a step' : `Training${at}`} with `
    + `${training === all ? 'all ' : `${training} of `}${plural(all, isRun ? 'rank' : 'group')}${away && ` (${away})`}, at step ${card.maxStep}.`;
}

// The groups that do not train, by state: named if they are few, else counted.
function awayOf(card) {
  const parts = [];
  for (const state of AWAY_STATES) {
    const names = card.groups.filter(member => member.state === state).map(member => member.replica_id).sort(compare);
    if (names.length) parts.push(names.length > AWAY_NAMED ? `${names.length} ${nameOf(state)}` : `${names.join(', ')} ${nameOf(state)}`);
  }
  return parts.join('; ');
}

function lost(card, job, pace) {
  const loss = (job.incidents || []).find(({kind}) => kind === 'loss');
  const parts = [
    pace && pace.goodput !== null && `Goodput ${percent(pace.goodput)}`,
    pace && pace.discards === 0 && !loss && 'nothing lost',
  ].filter(Boolean);
  return [
    parts.length && `${capital(parts.join(', '))}.`,
    loss && `Last loss: ${crowd(loss.suspects, card.groups.length)} ${duration(card.now_s - loss.opened_unix_s)} ago; ${outcome(loss)}.`,
  ].filter(Boolean).join(' ');
}

// Groups that receive their state within the current step, while the others wait.
function holdingUp(job) {
  const healing = new Set(job.members.filter(({state}) => state === 'healing').map(member => member.replica_id));
  return distinct(job.ranks.filter(rank => rank.phase === 'heal' && healing.has(rank.replica_id)).map(rank => rank.replica_id));
}

// The progress of each heal, the longest first.
function healing(job) {
  const members = job.members.filter(({heal}) => heal).sort((a, b) => b.heal.seconds - a.heal.seconds);
  const words = members.slice(0, HEALS_NAMED).map(member => `${member.replica_id} is ${member.heal.text}`);
  if (members.length > HEALS_NAMED) words.push(`${plural(members.length - HEALS_NAMED, 'more group')} healing`);
  return words.length ? `${words.join('; ')}.` : '';
}

function late(card, job, isTold) {
  const behind = job.ranks.filter(rank => rank.state === 'behind').map(rank => `${rank.replica_id}/${rank.group_rank}`).sort(compare);
  const told = new Set(job.members.filter(({heal}) => heal).map(member => member.replica_id));
  const heals = healsOf(job.timeline).filter(({name, to}) => to === null && !told.has(name)).map(({name}) => name);
  const parts = [behind.length && `behind ${listed(behind)}`, heals.length && `healing ${listed(heals)}`];
  if (!isTold) parts.push(awayOf(card));
  const words = parts.filter(Boolean).join('; ');
  return words && `${capital(words)}.`;
}
