// Threads that hash runs of memory, and do nothing else: no word is said to Python from one run to the next.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

// One run; `Run` in reading.py.
typedef struct {
    const void *start;
    int64_t size;
    uint64_t digest;
} run;

// Runs that are asked for together; `Group` in reading.py, whose memory it is until nothing is left.
typedef struct group {
    struct group *next;
    run *runs;
    int64_t count, taken;
    atomic_llong left;
} group;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    group *first, **last;
    uint64_t (*hash)(const void *, size_t);
    int event, stop, threads, cores, idle;
    const int32_t *core;
    atomic_int started;
    pthread_t thread[];
} pool;

// A core for each thread. Left to the scheduler, several crowd on the few cores where no replica computes, and the push
// waits for the slowest.
static void spread(pool *p) {
    int number = atomic_fetch_add(&p->started, 1);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(p->core[number % p->cores], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *work(void *argument) {
    pool *p = argument;
    spread(p);
    pthread_mutex_lock(&p->lock);
    for (;;) {
        p->idle++;
        while (!p->first && !p->stop) pthread_cond_wait(&p->more, &p->lock);
        p->idle--;
        if (p->stop) break;
        group *g = p->first;
        run *r = g->runs + g->taken++;
        if (g->taken == g->count && !(p->first = g->next)) p->last = &p->first;
        int more = p->first && p->idle;
        pthread_mutex_unlock(&p->lock);
        if (more) pthread_cond_signal(&p->more);  // each wakes the next: the store's loop, which asks, has to wake one
        r->digest = p->hash(r->start, r->size);
        uint64_t one = 1;
        if (atomic_fetch_sub(&g->left, 1) == 1 && write(p->event, &one, sizeof one) < 0) abort();
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

// event: an eventfd, written when nothing is left of a group. core: where threads run, `cores` of them; it must stay.
void *open_pool(int threads, int event, uint64_t (*hash)(const void *, size_t), const int32_t *core, int cores) {
    pool *p = calloc(1, sizeof *p + threads * sizeof(pthread_t));
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->more, NULL);
    p->last = &p->first, p->hash = hash, p->event = event, p->core = core, p->cores = cores;
    while (p->threads < threads && !pthread_create(&p->thread[p->threads], NULL, work, p)) p->threads++;
    if (p->threads) return p;
    free(p);
    return NULL;
}

// count is above 0, and left is count.
void submit(pool *p, group *g) {
    pthread_mutex_lock(&p->lock);
    g->next = NULL, g->taken = 0;
    *p->last = g, p->last = &g->next;
    int idle = p->idle;
    pthread_mutex_unlock(&p->lock);
    if (idle) pthread_cond_signal(&p->more);
}

int64_t left(group *g) { return atomic_load(&g->left); }

// What has not been taken is not done.
void close_pool(pool *p) {
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->threads; i++) pthread_join(p->thread[i], NULL);
    free(p);
}
