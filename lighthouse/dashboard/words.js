// Words, tones and small tools. The page shows whatever the lighthouse sends as text, never as markup.
const RUN_STATES = ['stopped', 'no_majority', 'too_few', 'waiting_for_ranks', 'backing_off', 'nobody_ready', 'ready', 'completed', 'stands'];
const STATES = ['expired', 'down', 'timed_out', 'starting', 'straggler', 'healing', 'idle', 'joined', 'participant', ...RUN_STATES];
const STATE_TONES = {
  expired: 'bad', down: 'bad', timed_out: 'warn', starting: 'busy', straggler: 'warn', idle: 'idle', joined: 'busy',
  participant: 'good', healing: 'busy', stopped: 'bad', no_majority: 'bad', too_few: 'bad', waiting_for_ranks: 'warn', backing_off: 'warn',
  nobody_ready: 'warn', ready: 'busy', completed: 'good', stands: 'good',
};
const STATE_HINTS = {
  participant: 'in the quorum and training', healing: 'in the quorum; receives its state from another group', joined: 'waits for the next quorum',
  straggler: 'alive but has not joined; the others wait for it', timed_out: 'alive but missed the join timeout; quorums form without it until it joins',
  starting: 'its manager is alive; some of its ranks are still starting',
  down: 'its manager is alive but ranks are lost; quorums form without it until it joins', idle: 'alive, never joined', expired: 'lost: no connection or no heartbeat',
  stopped: 'the run was stopped', no_majority: 'most ranks of the last generation are missing', too_few: 'too few ranks are ready for a generation',
  waiting_for_ranks: 'waits for ranks that are alive but not ready', backing_off: 'waits after failures before the next generation',
  nobody_ready: 'no rank is ready', ready: 'a generation is forming', completed: 'all ranks have finished', stands: 'its generation is training',
};
// As the page calls a state where another word is plainer; groups that are away, in the headline.
const STATE_NAMES = {timed_out: 'timed out', straggler: 'late', joined: 'joining', expired: 'lost', down: 'restarting', nobody_ready: 'no rank ready', stands: 'training'};
const nameOf = state => STATE_NAMES[state] || state.replaceAll('_', ' ');
const RANK_STATES = ['behind', 'lost', 'waiting', 'running', 'spare'];
const RANK_TONES = {behind: 'bad', lost: 'bad', waiting: 'busy', running: 'good'};
const RANK_HINTS = {
  behind: 'furthest behind while the job is stalled', lost: 'its replica group or its process is not alive',
  waiting: 'in a collective, or in a wait that its script has declared', running: 'training', spare: 'takes the place of a lost rank',
};
const VERDICT_TONES = {
  formed: 'good', ready: 'good', waiting_for_members: 'busy', waiting_for_stragglers: 'warn', waiting_for_recall: 'busy',
  waiting_for_reconnect: 'warn', waiting_for_leases: 'warn', waiting_for_lost_member: 'warn',
  too_few_participants: 'bad', no_allowed_size: 'bad', no_joins: 'idle',
};
const PHASE_HINTS = {
  none: 'no standing quorum: every step asks the lighthouse', returning: 'the lighthouse has restarted and waits for the members to reconnect',
  standing: 'managers start each step without asking the lighthouse', recalled: 'the members report their steps',
  resumed: 'the members finish the steps they have started, then join', revoked: 'ended: a member was lost or a step failed',
};
const KIND_TONES = {
  joined: 'good', left: 'idle', lost: 'bad', killed: 'bad', drained: 'warn', notice: 'warn', healing: 'busy', healed: 'good',
  quorum: 'idle', stall: 'bad', moves: 'good', incident: 'warn', loss: 'bad', not_applied: 'bad', divergence: 'bad', nonfinite: 'bad', restart: 'warn', exit: 'warn', slow: 'warn', chaos: 'warn',
};

const find = id => document.getElementById(id);
const count = (list, test) => list.reduce((sum, item) => sum + (test(item) ? 1 : 0), 0);
const compare = new Intl.Collator('en', {numeric: true}).compare;
const plural = (number, word) => `${number} ${word}${number === 1 ? '' : 's'}`;
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || 'local time';
// The last digits of a quorum's id tell it from its neighbours; the whole stands in a title.
const shortIds = text => String(text).replace(/\b\d{6,}(\d{4})\b/g, '…$1');
const clock = ms => new Date(ms).toLocaleTimeString([], {hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false});

function moment(unix_s) {
  const date = new Date(unix_s * 1000), isToday = date.toDateString() === new Date().toDateString();
  return isToday ? clock(date) : `${date.toLocaleDateString([], {month: 'short', day: 'numeric'})} ${clock(date).slice(0, 5)}`;
}

function duration(seconds) {
  const s = Math.max(0, seconds), pad = n => String(Math.floor(n)).padStart(2, '0');
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${pad(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(s % 3600 / 60)} m`;
  return `${Math.floor(s / 86400)} d ${pad(s % 86400 / 3600)} h`;
}

// These change a node only if its value differs.
function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

function setClass(node, names) {
  if (node.className !== names) node.className = names;
}

function setTitle(node, text) {
  if (node.title !== text) node.title = text;
}

function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

function add(parent, tag, className = '') {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return parent.appendChild(node);
}

function child(parent, tag, place) {
  while (parent.children.length <= place) add(parent, tag);
  return parent.children[place];
}

function trim(parent, length) {
  while (parent.children.length > length) parent.lastElementChild.remove();
}

function setPill(pill, names, text, hint = '') {
  setClass(pill, names);
  setText(pill, text);
  setTitle(pill, hint);
}
