// Events of streams that get one token after the other: what one looks like is a pattern with holes, so an event takes no
// Python, and no memory but that of its lane. See lanes.py, which has the words; nothing here asks for Python's lock.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { ID, LOGPROB, TEXT, NAME, BYTES, LENGTH, OFFSET };  // what fills a hole
enum { DUE = 1, WRITTEN };
enum { MOST_HOLES = 16, NUMBER = 32, CHUNK = 32, ROW_BITS = 20 };

// A token that stands for whole characters, as JSON writes it: its text, what it is called, its bytes.
struct token {
    char *json;  // the three one after the other; NULL: not known
    int32_t text, name, bytes;  // how long they are
    int32_t characters;  // of the text; -1: it is not whole, or special
};

struct lane {
    int64_t handle;  // with a serial number, so that one of a lane before this one fits nothing; 0: free
    int32_t socket;  // -1: not open, what comes is left
    int32_t pending;  // the newest token: 0 has been said, DUE, or has its event WRITTEN
    int32_t token, logprob_length;
    char logprob[NUMBER];  // of the newest token, as JSON writes it
    int64_t length, offset;  // tokens, and characters, of what was said
    int32_t holes, texts;  // texts: whether a hole needs the token to be known
    int32_t lengths[MOST_HOLES + 1];
    uint8_t kinds[MOST_HOLES];
    char *literals;  // what stands around the holes
    double said_at;
    int64_t count, room;  // of tokens since it was opened
    int64_t next;  // of a free one: 1 + the row of another; 0: there is none
    int32_t *ids;
    double *logprobs;
};

struct lanes {
    struct lane *all;
    struct token *tokens;
    int64_t count, vocabulary, serial, free;  // free: as `next`
    int64_t *due, due_count, due_room;
    char *said;  // events of one turn
    int64_t said_room;
};

// A lane whose event did not go out whole: it is closed. begin, end: what is left of it, in `said`.
struct stuck {
    int64_t handle, begin, end, told;
};

static int grow(void **memory, int64_t *room, int64_t wanted, int64_t size) {
    if (wanted <= *room) return 1;
    int64_t larger = *room ? *room : 16;
    while (larger < wanted) larger *= 2;
    void *moved = realloc(*memory, (size_t)(larger * size));
    if (!moved) return 0;
    *memory = moved, *room = larger;
    return 1;
}

static struct lane *find(struct lanes *lanes, int64_t handle) {
    int64_t row = handle & ((1 << ROW_BITS) - 1);
    if (!handle || row >= lanes->count || lanes->all[row].handle != handle) return NULL;
    return &lanes->all[row];
}

struct lanes *lanes_new(int64_t vocabulary) {
    struct lanes *lanes = calloc(1, sizeof *lanes);
    if (!lanes) return NULL;
    lanes->vocabulary = vocabulary;
    lanes->tokens = calloc((size_t)vocabulary, sizeof *lanes->tokens);
    if (lanes->tokens) return lanes;
    free(lanes);
    return NULL;
}

void lanes_delete(struct lanes *lanes) {
    for (int64_t i = 0; i < lanes->count; i++) {
        free(lanes->all[i].literals), free(lanes->all[i].ids), free(lanes->all[i].logprobs);
    }
    for (int64_t i = 0; i < lanes->vocabulary; i++) free(lanes->tokens[i].json);
    free(lanes->all), free(lanes->tokens), free(lanes->due), free(lanes->said);
    free(lanes);
}

// characters -1: it is known that each stream has to look at this token for itself.
void learn(struct lanes *lanes, int64_t id, const char *json, int32_t text, int32_t name, int32_t bytes,
           int32_t characters) {
    struct token *token = &lanes->tokens[id];
    int32_t size = text + name + bytes;
    char *kept = malloc((size_t)size + 1);
    if (!kept || token->json) {
        free(kept);
        return;
    }
    memcpy(kept, json, (size_t)size);
    *token = (struct token){kept, text, name, bytes, characters};
}

// A handle; 0: there is no room.
int64_t take(struct lanes *lanes) {
    if (!lanes->free) {
        int64_t room = lanes->count;
        if (room >> ROW_BITS || !grow((void **)&lanes->all, &room, room + 1, sizeof *lanes->all)) return 0;
        while (lanes->count < room) {
            lanes->all[lanes->count] = (struct lane){.next = lanes->free};
            lanes->free = ++lanes->count;
        }
    }
    int64_t row = lanes->free - 1;
    struct lane *lane = &lanes->all[row];
    lanes->free = lane->next;
    *lane = (struct lane){.handle = ++lanes->serial << ROW_BITS | row, .socket = -1};
    return lane->handle;
}

void give_back(struct lanes *lanes, int64_t handle) {
    struct lane *lane = find(lanes, handle);
    if (!lane) return;
    free(lane->literals), free(lane->ids), free(lane->logprobs);
    *lane = (struct lane){.next = lanes->free};
    lanes->free = lane - lanes->all + 1;
}

// Begin to say what comes. Of the pattern: literals, lengths of holes + 1 of them, kinds of the holes. Whether it did.
int open_lane(struct lanes *lanes, int64_t handle, int32_t socket, int64_t length, int64_t offset, const char *literals,
              const int32_t *lengths, const uint8_t *kinds, int32_t holes) {
    struct lane *lane = find(lanes, handle);
    int64_t size = 0;
    if (!lane || lane->count || holes > MOST_HOLES) return 0;
    for (int i = 0; i <= holes; i++) size += lengths[i];
    char *kept = realloc(lane->literals, (size_t)size + 1);
    if (!kept) return 0;
    memcpy(kept, literals, (size_t)size);
    memcpy(lane->lengths, lengths, sizeof *lengths * (size_t)(holes + 1));
    memcpy(lane->kinds, kinds, (size_t)holes);
    lane->literals = kept, lane->holes = holes, lane->length = length, lane->offset = offset, lane->texts = 0;
    for (int i = 0; i < holes; i++) lane->texts |= kinds[i] != ID && kinds[i] != LOGPROB && kinds[i] != LENGTH;
    lane->socket = socket;
    return 1;
}

// Tokens since it was opened; the newest has not been said where `pending`. -1: no such lane.
int64_t taken(struct lanes *lanes, int64_t handle, int64_t *pending) {
    struct lane *lane = find(lanes, handle);
    *pending = lane && lane->pending;
    return lane ? lane->count : -1;
}

// Close it until it is opened again, and copy out what `taken` counted.
void settle(struct lanes *lanes, int64_t handle, int32_t *ids, double *logprobs) {
    struct lane *lane = find(lanes, handle);
    if (!lane) return;
    if (lane->count) {
        memcpy(ids, lane->ids, sizeof *ids * (size_t)lane->count);
        memcpy(logprobs, lane->logprobs, sizeof *logprobs * (size_t)lane->count);
    }
    lane->socket = -1, lane->pending = 0, lane->count = 0;
}

double said_at(struct lanes *lanes, int64_t handle) {
    struct lane *lane = find(lanes, handle);
    return lane ? lane->said_at : 0.0;
}

static int hold(struct lanes *lanes, struct lane *lane, int32_t token, double logprob, const char *text, int64_t size) {
    if (lane->count == lane->room) {
        int64_t room = lane->room;
        if (!grow((void **)&lane->ids, &room, lane->count + 1, sizeof *lane->ids)) return 0;
        room = lane->room;
        if (!grow((void **)&lane->logprobs, &room, lane->count + 1, sizeof *lane->logprobs)) return 0;
        lane->room = room;
    }
    if (!grow((void **)&lanes->due, &lanes->due_room, lanes->due_count + 1, sizeof *lanes->due)) return 0;
    lanes->due[lanes->due_count++] = lane->handle;
    lane->ids[lane->count] = token, lane->logprobs[lane->count] = logprob, lane->count++;
    lane->token = token, lane->pending = DUE;
    memcpy(lane->logprob, text, (size_t)size);
    lane->logprob_length = (int32_t)size;
    return 1;
}

// A token for each of these lanes. numbers: the logprobs as a JSON list. What no lane takes is left, by its place i: those
// of lanes that are closed, or have one to say already; as -1 - i where the token is not known yet. How many are left.
int64_t take_in(struct lanes *lanes, const int64_t *handles, int64_t count, const int32_t *ids, const double *logprobs,
                const char *numbers, int64_t *left) {
    int64_t lefts = 0;
    const char *number = numbers + 1;
    for (int64_t i = 0; i < count; i++) {
        const char *end = number;
        while (*end != ',' && *end != ']') end++;
        struct lane *lane = find(lanes, handles[i]);
        int32_t id = ids[i];
        if (!lane || lane->socket < 0 || lane->pending || end - number > NUMBER) {
            left[lefts++] = i;
        } else if (id < 0 || id >= lanes->vocabulary) {
            left[lefts++] = i;
        } else if (lane->texts && !lanes->tokens[id].json) {
            left[lefts++] = -1 - i;
        } else if ((lane->texts && lanes->tokens[id].characters < 0) ||
                   !hold(lanes, lane, id, logprobs[i], number, end - number)) {
            left[lefts++] = i;
        }
        number = end + 1;
    }
    return lefts;
}

static char *put(char *at, const char *text, int64_t size) {
    memcpy(at, text, (size_t)size);
    return at + size;
}

static char *put_number(char *at, int64_t number) {
    char digits[NUMBER], *begin = digits + NUMBER;
    do *--begin = (char)('0' + number % 10);
    while (number /= 10);
    return put(at, begin, digits + NUMBER - begin);
}

// The event of what is pending, as a chunk of the transfer coding. NULL: no memory.
static char *write_event(struct lanes *lanes, struct lane *lane, int64_t *used) {
    static const struct token unknown = {NULL, 0, 0, 0, 0};
    const struct token *token = lane->texts ? &lanes->tokens[lane->token] : &unknown;
    const char *literal = lane->literals;
    int64_t size = CHUNK;
    for (int i = 0; i <= lane->holes; i++) size += lane->lengths[i];
    size += lane->holes * (int64_t)(NUMBER + token->text + token->name + token->bytes);
    if (!grow((void **)&lanes->said, &lanes->said_room, *used + size, 1)) return NULL;
    char *begin = lanes->said + *used + CHUNK, *at = begin, head[CHUNK];
    for (int i = 0;; i++) {
        at = put(at, literal, lane->lengths[i]), literal += lane->lengths[i];
        if (i == lane->holes) break;
        switch (lane->kinds[i]) {
        case ID: at = put_number(at, lane->token); break;
        case LOGPROB: at = put(at, lane->logprob, lane->logprob_length); break;
        case TEXT: at = put(at, token->json, token->text); break;
        case NAME: at = put(at, token->json + token->text, token->name); break;
        case BYTES: at = put(at, token->json + token->text + token->name, token->bytes); break;
        case LENGTH: at = put_number(at, lane->length + 1); break;
        case OFFSET: at = put_number(at, lane->offset); break;
        }
    }
    int written = sprintf(head, "%llx\r\n", (long long)(at - begin));
    memcpy(begin - written, head, (size_t)written);
    at = put(at, "\r\n", 2);
    *used = at - lanes->said;
    return begin - written;
}

// Say what is due: events of all first, then all are sent. stuck: room for as many as are due (`due`). How many are.
int64_t say(struct lanes *lanes, double now, struct stuck *stuck) {
    int64_t used = 0, count = 0, stuck_count = 0;
    // The offsets of events go where the results will be: an event's is read before a result can stand there.
    for (int64_t i = 0; i < lanes->due_count; i++) {
        struct lane *lane = find(lanes, lanes->due[i]);
        if (!lane || lane->pending != DUE) continue;  // settled since, or due twice as it was opened again
        char *begin = write_event(lanes, lane, &used);
        lane->pending = WRITTEN;
        stuck[count] = (struct stuck){lane->handle, begin ? begin - lanes->said : 0, begin ? used : 0, 0};
        count++;
    }
    lanes->due_count = 0;
    for (int64_t i = 0; i < count; i++) {
        struct stuck event = stuck[i];
        struct lane *lane = find(lanes, event.handle);
        int64_t size = event.end - event.begin;
        ssize_t sent = -1;
        if (size) {
            do sent = send(lane->socket, lanes->said + event.begin, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
            while (sent < 0 && errno == EINTR);
        }
        if (sent > 0) {
            lane->pending = 0, lane->length++, lane->said_at = now;
            if (lane->texts) lane->offset += lanes->tokens[lane->token].characters;
        }
        if (sent == size && size) continue;
        event.told = sent > 0, event.begin += sent > 0 ? sent : 0;
        stuck[stuck_count++] = event;
    }
    return stuck_count;
}

int64_t due(struct lanes *lanes) { return lanes->due_count; }

const char *said(struct lanes *lanes) { return lanes->said; }
