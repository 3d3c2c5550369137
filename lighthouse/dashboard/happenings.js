// Incidents, the timeline, runs.
const ENTRIES = 40, NAMES = 6;
const SPANS_S = [300, 900, 3600, 6 * 3600, 86400, 7 * 86400];
const SPAN_NAMES = ['5 min ago', '15 min ago', '1 h ago', '6 h ago', '1 day ago', '7 days ago'];

const brief = seconds => seconds < 1 ? `${Math.round(1000 * seconds)} ms` : duration(seconds);

// Up to NAMES names, else how many of all.
function crowd(names, all = 0) {
  if (names.length <= NAMES) return names.join(', ');
  return names.length < all ? `${names.length} of ${all} groups` : plural(names.length, 'group');
}

// -- the timeline

function showTimeline(card, entries, now_s) {
  const section = card.section.querySelector('.timeline'), newest = entries[entries.length - 1];
  showStrip(card, section, entries, now_s);
  const mark = newest ? [entries.length, newest.at_unix_s, newest.kind, newest.replica_ids.length, newest.more, card.entries].join() : '';
  if (card.timelineMark === mark) return;
  card.timelineMark = mark;
  const list = section.querySelector('ol'), shown = entries.slice(-card.entries).reverse();
  trim(list, shown.length);
  shown.forEach((entry, place) => {
    const line = child(list, 'li', place), when = child(line, 'time', 0), kind = child(line, 'span', 1), what = child(line, 'span', 2);
    setText(when, moment(entry.at_unix_s));
    setTitle(when, new Date(entry.at_unix_s * 1000).toLocaleString());
    setClass(kind, `kind ${KIND_TONES[entry.kind] || 'idle'}`);
    setText(kind, entry.kind);
    const names = [...entry.replica_ids].sort(compare), all = names.length + entry.more, who = child(what, 'b', 0);
    setText(who, all > NAMES ? plural(all, 'group') : names.join(', '));
    setTitle(who, all > NAMES ? names.join(', ') + (entry.more ? ` and ${entry.more} more` : '') : '');
    const words = child(what, 'span', 1);
    setText(words, `${entry.replica_ids.length && entry.text ? ' ' : ''}${shortIds(entry.text)}`);
    setTitle(words, shortIds(entry.text) === entry.text ? '' : entry.text);
  });
  setHidden(section.querySelector('.none'), entries.length > 0);
  setHidden(section.querySelector('.more'), shown.length === entries.length);
}

function showStrip(card, section, entries, now_s) {
  if (now_s - card.stripAt < 2 && card.stripOf === entries.length) return;
  card.stripAt = now_s;
  card.stripOf = entries.length;
  const age_s = entries.length ? now_s - entries[0].at_unix_s : 0;
  const span = Math.max(0, SPANS_S.findIndex(span_s => age_s <= span_s)), span_s = SPANS_S[span];
  const marks = new Map(['idle', 'good', 'busy', 'warn', 'bad'].map(tone => [tone, '']));
  for (const {at_unix_s, kind} of entries) {
    const x = 1000 * (1 - (now_s - at_unix_s) / span_s), tone = KIND_TONES[kind] || 'idle';
    if (x >= 0) marks.set(tone, `${marks.get(tone)}M${x.toFixed(1)} ${tone === 'bad' ? 0 : tone === 'idle' ? 11 : 5}V20`);
  }
  const strip = section.querySelector('.strip');
  for (const [tone, path] of marks) {
    const node = strip.querySelector(`.${tone}`) || strip.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'path'));
    node.setAttribute('class', tone);
    node.setAttribute('d', path);
  }
  setText(section.querySelector('.span span'), SPAN_NAMES[span]);
}

// -- incidents

// There was progress, or a step was committed since.
const isOver = incident => incident.over_s !== null || incident.kind !== 'stall' && incident.step_s !== null;

function showIncidents(section, incidents) {
  const list = section.querySelector('ol');
  setHidden(section.querySelector('.none'), incidents.length > 0);
  trim(list, incidents.length);
  incidents.forEach((incident, place) => showIncident(child(list, 'li', place), incident));
}

function showIncident(line, incident) {
  const head = child(line, 'div', 0), text = child(line, 'div', 1), offsets = child(line, 'div', 2);
  setClass(head, 'head');
  setPill(child(head, 'span', 0), `pill ${isOver(incident) ? 'idle' : KIND_TONES[incident.kind] || 'warn'}`, incident.kind.replaceAll('_', ' '),
    isOver(incident) ? 'over' : 'not over yet');
  setText(child(head, 'time', 1), moment(incident.opened_unix_s));
  const link = child(head, 'a', 2);
  if (link.dataset.id !== incident.id) {
    link.dataset.id = incident.id;
    link.href = `incidents/${encodeURIComponent(incident.id)}`;
    link.textContent = 'Evidence';
    link.ariaLabel = `Evidence of incident ${incident.id}`;
    link.onclick = event => showEvidence(event, incident.id);
  }
  setHidden(link, incident.evidence_s === null);
  setText(text, incident.kind === 'loss' && incident.suspects.length > NAMES ? `${plural(incident.suspects.length, 'group')} lost` : incident.text);
  setTitle(text, `incident ${incident.id} of ${incident.job}: ${incident.text}; suspects: ${incident.suspects.join(', ') || 'none'}`);
  setClass(offsets, 'soft');
  const parts = [`noticed after ${brief(incident.noticed_s)}`, acted(incident), outcome(incident)].filter(Boolean);
  setText(offsets, `${capital(parts.join('; '))}.`);
  setTitle(offsets, incident.quorum_id ? `quorum ${incident.quorum_id} formed after ${brief(incident.quorum_s)}` : '');
}

const acted = incident => incident.acted_s === null || !incident.action ? '' : `${incident.action} after ${brief(incident.acted_s)}`;

// What the fault cost, counted from it.
function outcome(incident) {
  if (incident.kind === 'exit') return '';
  if (incident.kind === 'slow') return incident.over_s === null ? 'still slow' : `slow for ${brief(incident.over_s)}`;
  if (incident.kind === 'stall' && incident.over_s === null) return 'no progress since';
  const at_s = incident.kind === 'stall' ? incident.over_s : incident.step_s, {back_s} = incident;
  if (at_s === null) return 'no step since';
  const back = back_s === null || back_s === undefined ? '' : `, ${incident.suspects.length > 1 ? 'all ' : ''}back after ${brief(back_s)}`;
  return `training continued after ${brief(at_s)}${back}`;
}

// -- runs

function showRuns(known) {
  const list = find('runs').querySelector('ul');
  const runs = known.filter(run => run.counters.number >= 0 || run.ranks.length || run.counters.job_restarts || run.stop || run.excluded.length || run.supervisors.length);
  setHidden(find('runs'), !runs.length);
  trim(list, runs.length);
  runs.forEach((run, place) => {
    const line = child(list, 'li', place), text = child(line, 'span', 0), button = child(line, 'button', 1);
    setText(text, describeRun(run));
    button.type = 'button';
    setClass(button, 'quiet');
    setText(button, ACTS.resume.title(run));
    button.onclick = () => askToAct('resume', {job: run.job, run: run.run});
    setHidden(button, !control.may_act || !run.stop && !run.excluded.length);
  });
}

// The run of groups that train by quorums has supervisors, but no generations and no ranks.
function describeRun(run) {
  if (run.supervisors.length && run.counters.number < 0 && !run.ranks.length && !run.stop) {
    return `${run.job}/${run.run}: ${describeSupervisors(run.supervisors)}`;
  }
  const at = run.counters.number < 0 ? 'no generation yet' : `generation ${run.counters.number}`;
  const spares = plural(count(run.ranks, rank => rank.state === 'spare'), 'spare');
  const stop = run.stop ? `, stopped: ${run.stop.reason}` : '';
  return `${run.job}/${run.run}: ${at}, ${plural(run.slots.length, 'rank')}, ${spares}, `
    + `${plural(run.counters.job_restarts, 'restart')}, ${nameOf(run.verdict)}${stop}`;
}

// The sum, then the groups that are not at full strength or were restarted.
function describeSupervisors(supervisors) {
  const connected = supervisors.filter(({is_connected}) => is_connected);
  const noted = supervisors.filter(({is_connected, slots, last}) => !is_connected || last.restarts || last.running < slots.length);
  const more = noted.length > NAMES ? [`${noted.length - NAMES} more`] : [];
  return `${plural(supervisors.length, 'supervisor')}, ${sum(connected, ({last}) => last.running)} of `
    + `${plural(sum(supervisors, ({slots}) => slots.length), 'rank')} running, ${plural(sum(connected, ({last}) => last.restarts), 'restart')}`
    + (noted.length ? ` (${[...noted.slice(0, NAMES).map(describeSupervisor), ...more].join('; ')})` : '');
}

function describeSupervisor({name, slots, is_connected, last}) {
  if (!is_connected) return `${name} is not connected`;
  return `${name}: ${last.running} of ${plural(slots.length, 'rank')} running, ${plural(last.restarts, 'restart')}, ${last.restarts_left} left`;
}
