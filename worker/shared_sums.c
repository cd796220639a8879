// Sums and gathers of the ranks of one replica, over memory that all of them have mapped. shared_sums.py says how they
// meet, docs/adr/0028-ranks-on-cpus-sum-in-shared-memory.md which states there are.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, PART = 1 << 18, SIDES = 2, RANKS = 64, BLOCK = 512 };
// PART: bytes of a side, which a round carries of each rank. BLOCK: numbers that are added up while they are in the cache.

enum { DONE, GONE, LATE, BROKEN, UNLIKE };

// What a rank tells the others; a cache line.
typedef struct {
    _Atomic uint32_t laid;    // rounds whose part it has laid down: the futex that others wait on
    _Atomic uint32_t waiting; // ranks that may be asleep on it
    uint64_t what[SIDES];     // the collective that the round of this parity belongs to
    char rest[LINE - 8 - 8 * SIDES];
} rank_line;

typedef struct {
    _Atomic uint32_t broken; // a rank has given up: nobody will wait any more
    char rest[LINE - 4];     // with what the segment is known by
    rank_line lines[];       // of each rank; behind them the parts, [ranks][SIDES][PART]
} segment;

// One rank's place; `Place` in shared_sums.py.
typedef struct {
    segment *shared;
    int64_t ranks, rank;
    int64_t limit_ns, look_ns, spin_ns; // of a wait: all of it, between two looks whether the other lives, before sleep
    int64_t at_fault;                   // of the last call: the rank that it says something about
    uint32_t round;                     // the last one that this rank has laid its part of
    int32_t pidfds[RANKS];
} place;

int64_t segment_bytes(int64_t ranks) { return LINE + ranks * (LINE + (int64_t)SIDES * PART); }

// A descriptor of an empty file without a name, or minus the errno. Not os.memfd_create: a Python that was built for an
// old C library has none.
int64_t new_segment(void) {
    int fd = syscall(SYS_memfd_create, "paddle-rollout-sums", MFD_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static char *part_of(const place *p, int64_t rank, uint32_t round) {
    char *parts = (char *)(p->shared->lines + p->ranks);
    return parts + (rank * SIDES + round % SIDES) * PART;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, 0, 0, 0); }

static int behind(uint32_t laid, uint32_t round) { return (int32_t)(laid - round) < 0; }

static int ended(int pidfd) {
    struct pollfd asked = {pidfd, POLLIN, 0};
    return poll(&asked, 1, 0) > 0;
}

// Until that rank has laid down its part of this rank's round.
static int wait_for(const place *p, int64_t rank) {
    rank_line *line = p->shared->lines + rank;
    int64_t began = now();
    do {
        for (int i = 0; i < 16; i++) {
            if (!behind(atomic_load_explicit(&line->laid, memory_order_acquire), p->round)) return DONE;
            breathe();
        }
    } while (now() < began + p->spin_ns);
    struct timespec look = {p->look_ns / 1000000000, p->look_ns % 1000000000};
    for (int gone = 0;;) {
        int slept = 0;
        atomic_fetch_add(&line->waiting, 1); // before the look at `laid`, as round_of() writes that before it looks here
        uint32_t laid = atomic_load(&line->laid);
        if (behind(laid, p->round) && !gone && !atomic_load(&p->shared->broken))
            slept = syscall(SYS_futex, &line->laid, FUTEX_WAIT, laid, &look, 0, 0) && errno == ETIMEDOUT;
        atomic_fetch_sub(&line->waiting, 1);
        if (!behind(atomic_load(&line->laid), p->round)) return DONE;
        if (atomic_load(&p->shared->broken)) return BROKEN;
        if (gone) return GONE; // with all that it had laid down looked at
        if (now() >= began + p->limit_ns) return LATE;
        gone = slept && ended(p->pidfds[rank]);
    }
}

static int give_up(place *p, int64_t rank, int why) {
    p->at_fault = rank;
    atomic_store(&p->shared->broken, 1);
    for (int64_t r = 0; r < p->ranks; r++) wake(&p->shared->lines[r].laid);
    return why;
}

// A round: this rank's part is laid down, and then all are there. A side is free again by then: whoever laid down a part
// of the round before has taken what it needs of the one before that.
static int round_of(place *p, uint64_t what, const char *own, int64_t bytes) {
    if (atomic_load(&p->shared->broken)) return give_up(p, p->rank, BROKEN);
    rank_line *mine = p->shared->lines + p->rank;
    p->round++;
    memcpy(part_of(p, p->rank, p->round), own, bytes);
    mine->what[p->round % SIDES] = what;
    atomic_store(&mine->laid, p->round);
    if (atomic_load(&mine->waiting)) wake(&mine->laid);
    for (int64_t r = 0; r < p->ranks; r++) {
        if (r == p->rank) continue;
        int why = wait_for(p, r);
        if (why) return give_up(p, r, why);
        if (p->shared->lines[r].what[p->round % SIDES] != what) return give_up(p, r, UNLIKE);
    }
    return DONE;
}

// Numbers start..start+count of the parts of ranks first..end, each half by itself, then both added up.
static void add(const place *p, int64_t first, int64_t end, int64_t start, int64_t count, float *into) {
    if (end - first == 1) {
        memcpy(into, part_of(p, first, p->round) + start * sizeof(float), count * sizeof(float));
        return;
    }
    int64_t half = first + (end - first) / 2;
    float high[BLOCK];
    add(p, first, half, start, count, into);
    add(p, half, end, start, count, high);
    for (int64_t i = 0; i < count; i++) into[i] += high[i];
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// own [count] = the sum of all ranks' own. Returns DONE, or why it cannot be any more.
int64_t sum(place *p, float *own, int64_t count) {
    const int64_t most = PART / sizeof(float);
    for (int64_t at = 0; at < count; at += most) {
        int64_t here = least(most, count - at);
        int why = round_of(p, (uint64_t)count << 1, (const char *)(own + at), here * sizeof(float));
        if (why) return why;
        for (int64_t start = 0; start < here; start += BLOCK)
            add(p, 0, p->ranks, start, least(BLOCK, here - start), own + at + start);
    }
    return DONE;
}

// into [rows, ranks, row] = all ranks' own [rows, row], whose numbers have `row` bytes a row. Returns as `sum`.
int64_t gather(place *p, const char *own, int64_t rows, int64_t row, char *into) {
    const int64_t total = rows * row;
    for (int64_t at = 0; at < total; at += PART) {
        int64_t end = least(at + PART, total);
        int why = round_of(p, (uint64_t)total << 1 | 1, own + at, end - at);
        if (why) return why;
        for (int64_t r = 0; r < p->ranks; r++) {
            const char *part = part_of(p, r, p->round);
            for (int64_t b = at, run; b < end; b += run) {
                run = least(row - b % row, end - b);
                memcpy(into + (b / row * p->ranks + r) * row + b % row, part + (b - at), run);
            }
        }
    }
    return DONE;
}
