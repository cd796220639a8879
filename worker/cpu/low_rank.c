// What adapters add to a product: y += scale * B (A x), each token with its own adapter's A and B, or with none.
//
// Tokens are sorted by adapter into runs, so A and B are read once for a run (shrink.h, expand.h). Both lie as they are
// read (pack.c): A with what belongs to an input side by side, the ranks of all the product's parts in the lanes, B in
// chunks of outputs. Every sum is made in one order that depends on the shape of A and B alone: over the inputs one by one,
// in slices whose sums are added up, and over the rank one by one. So what is added to a token does not show who else is in
// the step.

#include <sched.h>

#include "expand.h"

#define NEXT (2 << 20)  // most bytes of A that are fetched a product ahead: what second caches have room for

// All jobs of a phase are done, by whichever threads there are.
static void wait_for(const int64_t *done, int64_t count) {
    for (int64_t turns = 1; __atomic_load_n(done, __ATOMIC_ACQUIRE) < count; turns++)
        if (turns % 1024 == 0) sched_yield();
}

static void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

// What is read next but one: the beginning of the next run's A, or behind the last run those of the first B's.
static void fetch_after(const LowRank *s, int64_t run) {
    if (run + 1 < s->step->run_count) {
        fetch(factors_of(s, s->step->runs + run + 1)->a, AHEAD);
        return;
    }
    for (int64_t i = 0; i < 2 && i < s->step->run_count; i++) {
        const Factors *f = factors_of(s, s->step->runs + i);
        fetch(f->b[0], CHUNK * f->rank[0] * (f->narrow ? 2 : 4));
    }
}

void low_rank_between(LowRank *s, const float *words) {
    const int64_t runs = s->step->run_count, of_slice = ceiling(most_of(s), VECTORS * 16), at_once = together(s);
    const int64_t of_run = of_slice * s->slices / at_once;
    int64_t job;
    while ((job = __atomic_fetch_add(&s->next[0], 1, __ATOMIC_RELAXED)) < runs * of_run) {
        const Run *run = s->step->runs + job / of_run;
        const Factors *f = factors_of(s, run);
        int64_t slice = job % of_run / of_slice * at_once, rank = job % of_slice * VECTORS * 16;
        if (job % of_run == 0) fetch_after(s, job / of_run);
        if (rank < f->ranks) {
            if (s->x_narrow || s->x_round) shrink(s, words, run, slice, rank, 1, 1);
            else if (f->narrow) shrink(s, words, run, slice, rank, 1, 0);
            else shrink(s, words, run, slice, rank, 0, 0);
        }
        int64_t *ready = s->step->ready + job / of_run;
        if (__atomic_add_fetch(ready, 1, __ATOMIC_ACQ_REL) == of_run) {
            *ready = 0;
            combine(s, run);
            __atomic_fetch_add(&s->done, 1, __ATOMIC_RELEASE);
        }
    }
}

void low_rank_add(const LowRank *s, int64_t part, int64_t chunk, float *to, int64_t step) {
    wait_for(&s->done, s->step->run_count);
    expand(s, (Into){to, step, 1, 0}, part, chunk * CHUNK, 1);
}

int64_t low_rank_ahead(const LowRank *s, int64_t part, int64_t parts, int64_t chunk, int64_t claim, int64_t claims,
                       Ahead *ahead, Piece pieces[PIECES]) {
    const Step *step = s->step;
    int64_t count = 0, bytes = 0, of_next = 0;
    for (int64_t i = 0; i < step->run_count; i++) {
        const Factors *f = factors_of(s, step->runs + i);
        for (int64_t p = part; p < part + parts; p++) {
            const int64_t of_row = f->rank[p] * (f->narrow ? 2 : 4), rows = s->outputs[p] - chunk * CHUNK;
            if (!of_row) continue;
            pieces[count] = (Piece){(const char *)f->b[p] + chunk * CHUNK * of_row, (rows < CHUNK ? rows : CHUNK) * of_row};
            bytes += pieces[count++].bytes;
        }
    }
    const Factors *next = s->step->factors + s->next_site * step->adapters;
    if (s->next_site >= 0)
        for (int64_t i = 0; i < step->adapters; i++) of_next += s->next_inputs * next[i].ranks * (next[i].narrow ? 2 : 4);
    if (of_next <= NEXT) {
        // A share of A's, all of them taken for one after the other, and each for whole lines.
        int64_t from = of_next / 64 * claim / claims * 64, until = of_next / 64 * (claim + 1) / claims * 64;
        if (claim + 1 == claims) until = of_next;
        for (int64_t i = 0, before = 0; i < step->adapters && before < until; i++) {
            const int64_t size = s->next_inputs * next[i].ranks * (next[i].narrow ? 2 : 4), end = before + size;
            const int64_t low = from > before ? from : before, high = until < end ? until : end;
            if (low < high) {
                pieces[count] = (Piece){(const char *)next[i].a + (low - before), high - low};
                bytes += pieces[count++].bytes;
            }
            before = end;
        }
    }
    *ahead = (Ahead){0, 0, pieces, pieces + count, 0};
    return bytes;
}

// Run on every thread of a team, beside a product that does none of it.
void low_rank(void *data) {
    LowRank *s = data;
    low_rank_between(s, 0);
    wait_for(&s->done, s->step->run_count);
    int64_t job, first = 0, before = 0;
    int part = 0;
    while ((job = __atomic_fetch_add(&s->next[1], 1, __ATOMIC_RELAXED)) >= 0) {
        while (part < s->parts && job - before >= ceiling(s->outputs[part], CHUNK)) {
            before += ceiling(s->outputs[part], CHUNK);
            first += s->outputs[part++];
        }
        if (part == s->parts) return;
        const int64_t row = (job - before) * CHUNK;
        expand(s, (Into){s->y + (first + row) * s->y_step, s->y_step, s->y_token, 0}, part, row, 0);
    }
}

// For the caller to see that it means the same structures.
int64_t low_rank_bytes(void) { return sizeof(LowRank); }
int64_t low_rank_step_bytes(void) { return sizeof(Step); }
int64_t factors_bytes(void) { return sizeof(Factors); }
