// The history of a run's numbers, asked for once and then only for what is new.

import { get } from "./api.js";

export const NAMES = {
  reward: "ppo_actor/task_reward/avg", heldOut: "eval/task_reward/avg", samplesPerS: "throughput/samples_per_s",
  tokensPerS: "throughput/tokens_per_s", samples: "rollout/samples", stepS: "timing/step", waitS: "timing/wait_for_batch",
  staleness: "rollout/staleness/avg", stalest: "rollout/staleness/max",
};

export class History {
  constructor() {
    this.names = [];
    this.asked = new Set(Object.values(NAMES));
    this.series = new Map();
    this.since = new Map();
  }

  /** The points of a series: [[step, value]]. */
  of(name) {
    return this.series.get(name) ?? [];
  }

  /** Also this series from now on. */
  add(name) {
    this.asked.add(name);
  }

  /** Get what is new of every series that is asked for. */
  async refresh() {
    for (const [since, names] of Map.groupBy(this.asked, (name) => this.since.get(name) ?? 0)) await this.#from(since, names);
  }

  async #from(first, names) {
    for (let since = first; since !== null; ) {
      const query = new URLSearchParams([["since_step", since], ["limit", 10000], ...names.map((name) => ["name", name])]);
      const page = await get(`/v1/metrics/history?${query}`);
      this.names = page.names;
      for (const { name, points } of page.series) this.#merge(name, points);
      since = page.next_step;
    }
    for (const name of names) this.since.set(name, this.#lastStep());
  }

  #merge(name, points) {
    if (!points.length) return;
    const kept = this.of(name);
    const before = kept.length && kept.at(-1)[0] >= points[0][0] ? kept.filter(([step]) => step < points[0][0]) : kept;
    this.series.set(name, before.concat(points));
  }

  /** The last step of all series: it is asked for again, as its numbers may have come in parts. */
  #lastStep() {
    return Math.max(0, ...[...this.series.values()].map((points) => points.at(-1)[0]));
  }
}

/** Points of two series put together, by step. */
export function joined(left, right, join) {
  const other = new Map(right);
  return left.filter(([step]) => other.has(step)).map(([step, value]) => [step, join(value, other.get(step))]);
}
