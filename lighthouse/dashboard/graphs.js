// How a job went in the last minutes: three curves of the lighthouse's samples, and below them the heals and stalls of each group.
const SVG = 'http://www.w3.org/2000/svg', WIDE = 600, HIGH = 60, GAP_S = 7, MOST_BANDS = 12;
const GRAPH_SPANS_S = [60, 120, 300, 600];
const figure = value => value.toFixed(value < 10 ? 2 : 1);
const GRAPHS = [
  {title: 'Steps per second', now: pace => pace.steps_per_s, then: pace => pace.steps_per_s_then, say: figure, most: 0},
  {title: 'Groups training', now: pace => pace.training, then: pace => pace.training_then, say: (value, pace) => `${value} of ${pace.alive} alive`,
    most: 1, also: pace => pace.alive_then, alsoNow: pace => pace.alive},
  {title: 'Goodput', now: pace => pace.goodput, then: pace => pace.goodput_then, say: value => percent(value), most: 1,
    hint: 'time in committed steps over the time of all replica groups'},
];

const addSvg = (parent, tag, name) => {
  const node = document.createElementNS(SVG, tag);
  node.setAttribute('class', name);
  return parent.appendChild(node);
};
const svgChild = (parent, tag, name) => parent.querySelector(`.${name}`) || addSvg(parent, tag, name);

function showGraphs(card, job, pace) {
  const section = card.section.querySelector('.graphs');
  setHidden(section, !pace || pace.ages_s.length < 2);
  if (section.hidden) return;
  const span_s = GRAPH_SPANS_S.find(length_s => pace.ages_s[0] <= length_s) || GRAPH_SPANS_S.at(-1);
  const list = section.querySelector('.curves');
  GRAPHS.forEach((graph, place) => showGraph(child(list, 'figure', place), graph, pace, span_s));
  showBands(section, job, card.now_s, span_s);
  setText(section.querySelector('.span span'), `${span_s / 60} min ago`);
}

function showGraph(node, graph, pace, span_s) {
  const caption = child(node, 'figcaption', 0), now = graph.now(pace);
  const points = [...graph.then(pace), now], others = graph.also ? [...graph.also(pace), graph.alsoNow(pace)] : [];
  const known = [...points, ...others].filter(value => value !== null), peak = Math.max(...known, 0), most = Math.max(graph.most, peak) || 1;
  setText(child(caption, 'span', 0), graph.title);
  setText(child(caption, 'b', 1), now === null ? '–' : graph.say(now, pace));
  setText(child(caption, 'small', 2), known.length && !graph.hint ? `peak ${graph.also ? peak : figure(peak)}` : '');
  setTitle(node, graph.hint || '');
  const svg = svgChild(node, 'svg', 'curve'), ages = [...pace.ages_s, 0];
  svg.setAttribute('viewBox', `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', `${graph.title}, the last ${span_s / 60} min: now ${now === null ? 'not known' : graph.say(now, pace)}`);
  const line = curve(points, ages, span_s, most);
  svgChild(svg, 'path', 'area').setAttribute('d', line.map(({d, from, to}) => `${d}L${to} ${HIGH}L${from} ${HIGH}Z`).join(''));
  if (others.length) svgChild(svg, 'path', 'other').setAttribute('d', curve(others, ages, span_s, most).map(({d}) => d).join(''));
  svgChild(svg, 'path', 'line').setAttribute('d', line.map(({d}) => d).join(''));
}

// One piece for each stretch in which something is known.
function curve(values, ages, span_s, most) {
  const pieces = [];
  values.forEach((value, place) => {
    if (value === null || ages[place] > span_s) return;
    const x = (WIDE * (1 - ages[place] / span_s)).toFixed(1), y = (HIGH - 2 - (HIGH - 6) * value / most).toFixed(1), piece = pieces.at(-1);
    if (piece && piece.place === place - 1 && ages[place - 1] - ages[place] < GAP_S) Object.assign(piece, {d: `${piece.d}L${x} ${y}`, to: x, place});
    else pieces.push({d: `M${x} ${y}`, from: x, to: x, place});
  });
  return pieces;
}

// -- bands

// `to` is null for a heal that goes on.
function healsOf(entries) {
  const heals = [], open = new Map();
  for (const {at_unix_s, kind, replica_ids} of entries) {
    for (const name of replica_ids) {
      if (['healing', 'healed', 'lost', 'left'].includes(kind) && open.has(name)) {
        open.get(name).to = at_unix_s;
        open.delete(name);
      }
      if (kind !== 'healing') continue;
      const heal = {name, kind: 'heal', from: at_unix_s, to: null};
      open.set(name, heal);
      heals.push(heal);
    }
  }
  return heals;
}

// A stall that is not over, while something moves, was cut short by the end of an earlier lighthouse.
function stallsOf(job) {
  const stalls = [];
  for (const incident of job.incidents || []) {
    if (incident.kind !== 'stall') continue;
    const from = incident.opened_unix_s - incident.noticed_s;
    const to = incident.over_s !== null ? from + incident.over_s : job.stall ? null : incident.opened_unix_s;
    for (const name of incident.suspects.length ? groupsOf(incident) : ['all groups']) stalls.push({name, kind: 'stall', from, to});
  }
  return stalls;
}

// Those that show something within the span, the newest first.
function bandsOf(job, now_s, span_s) {
  const bands = new Map(), spans = [...healsOf(job.timeline), ...stallsOf(job)].map(span => ({...span, to: span.to ?? now_s}));
  for (const span of spans.filter(({to}) => to > now_s - span_s).sort((a, b) => b.to - a.to)) {
    bands.set(span.name, [...bands.get(span.name) || [], span]);
  }
  return [...bands];
}

function showBands(section, job, now_s, span_s) {
  const bands = bandsOf(job, now_s, span_s), list = section.querySelector('.bands'), shown = bands.slice(0, MOST_BANDS);
  setHidden(section.querySelector('.banded'), !bands.length);
  trim(list, shown.length);
  shown.forEach(([name, spans], place) => {
    const row = child(list, 'li', place), svg = svgChild(row, 'svg', 'band');
    if (row.firstElementChild === svg) row.prepend(document.createElement('span'));
    setText(row.firstElementChild, name);
    svg.setAttribute('viewBox', `0 0 ${WIDE} 10`);
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.setAttribute('role', 'img');
    svg.setAttribute('aria-label', spans.map(({kind, from, to}) => `${kind} at ${moment(from)}, ${duration(to - from)}`).join('; '));
    setTitle(row, svg.getAttribute('aria-label'));
    for (const [kind, tone] of [['heal', 'busy'], ['stall', 'bad']]) svgChild(svg, 'path', tone).setAttribute('d', spans.filter(span => span.kind === kind).map(({from, to}) => {
      const x = at => Math.max(0, WIDE * (1 - (now_s - at) / span_s)), begin = Math.min(x(from), WIDE - 2);
      return `M${begin.toFixed(1)} 0H${Math.max(x(to), begin + 2).toFixed(1)}V10H${begin.toFixed(1)}Z`;
    }).join(''));
  });
  setText(section.querySelector('.moreBands'), bands.length > shown.length ? `and ${bands.length - shown.length} more` : '');
}
