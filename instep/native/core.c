/* The native core of shared memory: ranks meet, and numbers are added, without the interpreter.
 *
 * Shared memory needs it; ranks without it use gloo, and add in Python, with the same bits. So arithmetic is
 * elementwise, in the order that is asked for, and compiled without contraction and without fast math: however
 * wide the vectors are, no bit differs. (Of two nans with different bits a sum is one, and no language says
 * which; torch's own loops differ in it.)
 *
 * Ranks meet in words of shared memory, each on a cache line of its own:
 *
 *     posted[r]   written by rank r alone, only grows: r has come to so many rounds
 *     done        the last complete round, as its last rank found it; what ranks sleep on
 *     sleepers    how many sleep, or are about to
 *
 *     to come:    posted[r] = n; read all posted; if all are there: done = n; if sleepers: wake them
 *     to sleep:   sleepers + 1; read done and all posted; if not all are there: sleep while done is unchanged
 *
 * All of these are sequentially consistent, so they have one order. Of the ranks of a round the last to post
 * reads that all are there. Who was counted as a sleeper before it asks is woken; who is counted later reads,
 * after that, that all are there. So a wake costs a system call only where a rank sleeps, and none is missed.
 * Data that a rank wrote before it posted is there for those who read its post.
 *
 * Nothing in here waits for long: after a slice it returns to Python, which looks after signals, deadlines and
 * the lives of the other ranks, and calls again.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef INSTEP_STAMP
#define INSTEP_STAMP "none"
#endif
#define API __attribute__((visibility("default")))
/* One body compiled for several vector units, chosen when the library is loaded. */
#if defined(__x86_64__) && !defined(INSTEP_ONE_TARGET)
#define CLONES static __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES static __attribute__((noinline))
#endif

enum { MOST_RANKS = 64, LINE = 64, BLOCK_BYTES = 8192, BLOCKS_BYTES = 24576, LEAST_BLOCK_BYTES = 1024 };
enum { THERE = 0, MISSING = 1, DIFFERENT = 2, SHARED = 3, FAILED = -1 };
enum { FLOAT32 = 0, FLOAT64 = 1 };
enum { ADD = 0, MULTIPLY = 1 };
enum { NO_SCALE = 0, TIMES = 1, DIVIDED = 2 };

API const char *instep_stamp(void) { return INSTEP_STAMP; }

/* ---- words ---------------------------------------------------------------------------------------------- */

#define LOAD(word) __atomic_load_n((word), __ATOMIC_SEQ_CST)
#define STORE(word, value) (void)__atomic_exchange_n((word), (value), __ATOMIC_SEQ_CST)

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint32_t *low_half(int64_t *word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return (uint32_t *)word + 1;
#else
    return (uint32_t *)word;
#endif
}

static void wake_all(int64_t *word) {
    int before = errno;
    syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    errno = before;
}

/* Sleep while the low half of the word is that of value, for so long at most; 0, or why not. */
static int sleep_on(int64_t *word, int64_t value, int64_t ns) {
    struct timespec limit = {ns / 1000000000, ns % 1000000000};
    int before = errno, found;
    long failed = syscall(SYS_futex, low_half(word), FUTEX_WAIT, (uint32_t)value, &limit, NULL, 0);
    found = failed ? errno : 0;
    errno = before;
    return found;
}

API int64_t instep_load(int64_t *word) { return LOAD(word); }

API void instep_store(int64_t *word, int64_t value) { STORE(word, value); }

API void instep_wake(int64_t *word) { wake_all(word); }

API int instep_spin(int64_t *word, int64_t target, int64_t ns) {
    int64_t until = 0;
    for (uint64_t turn = 0; LOAD(word) < target; turn++) {
        if (turn % 64 == 0) {
            int64_t now = now_ns();
            if (until == 0) until = now + ns;
            if (now >= until) return 0;
        }
        relax();
    }
    return 1;
}

API void instep_sleep(int64_t *word, int64_t target, int64_t ns) {
    int64_t value = LOAD(word);
    if (value < target && ns > 0) sleep_on(word, value, ns);
}

/* ---- rounds --------------------------------------------------------------------------------------------- */

/* A group's shared words and halves, as rank sees them; of a block the first line is posted, the next state. */
struct group {
    int64_t size, rank;
    uint8_t *blocks;
    int64_t block_bytes;
    int64_t *done, *sleepers;
    uint8_t *halves; /* two per rank */
    int64_t half_bytes;
    int64_t spin_ns; /* for how long a wait spins now */
    int64_t yields;  /* whether there are more ranks than cores */
};

/* To fall asleep and be woken takes some 20 us, on a virtual machine 100; to spin takes the core from a thread
 * that computes. So waits that end soon after the rank fell asleep let the next ones spin for longer, and long
 * ones, as for a rank that still computes, for less. With more ranks than cores the awaited one may need this
 * core: then to spin is to offer it to others again and again, and after long waits not to spin at all. */
enum { LEAST_SPIN_NS = 15000, MOST_SPIN_NS = 120000, LEAST_YIELD_NS = 1000, MOST_YIELD_NS = 60000 };
enum { SOON_NS = 300000 };

static int64_t *posted(const struct group *g, int64_t rank) {
    return (int64_t *)(g->blocks + rank * g->block_bytes);
}

static int complete(const struct group *g, int64_t target) {
    for (int64_t i = 1; i < g->size; i++) {
        int64_t rank = g->rank + i < g->size ? g->rank + i : g->rank + i - g->size;
        if (LOAD(posted(g, rank)) < target) return 0;
    }
    return 1;
}

/* Whether a rank that has not come has said that it will not, or this one has left meanwhile. */
static int deserted(const struct group *g, int64_t target) {
    for (int64_t rank = 0; rank < g->size; rank++)
        if ((rank == g->rank || LOAD(posted(g, rank)) < target) && LOAD(posted(g, rank) + LINE / 8) != 0)
            return 1;
    return 0;
}

static void post_round(const struct group *g, int64_t number) {
    if (LOAD(posted(g, g->rank)) >= number) return; /* called again after a slice */
    STORE(posted(g, g->rank), number);
    if (!complete(g, number)) return;
    STORE(g->done, number);
    if (LOAD(g->sleepers) > 0) wake_all(g->done);
}

static int spin_for_round(const struct group *g, int64_t number, int64_t until) {
    for (uint64_t turn = 1;; turn++) {
        if (g->yields) sched_yield();
        else relax();
        if (complete(g, number)) return THERE;
        if ((g->yields || turn % 16 == 0) && now_ns() >= until) return MISSING;
    }
}

static int sleep_for_round(const struct group *g, int64_t number, int64_t sleep_ns) {
    int64_t until = now_ns() + sleep_ns;
    for (int64_t left_ns = sleep_ns; left_ns > 0; left_ns = until - now_ns()) {
        __atomic_fetch_add(g->sleepers, 1, __ATOMIC_SEQ_CST);
        int64_t before = LOAD(g->done);
        int there = complete(g, number), why = EAGAIN;
        if (!there && !deserted(g, number)) why = sleep_on(g->done, before, left_ns);
        __atomic_fetch_sub(g->sleepers, 1, __ATOMIC_SEQ_CST);
        if (there || complete(g, number)) return THERE;
        /* A wake may have been meant for the round before. */
        if (why == EINTR || deserted(g, number)) return MISSING;
    }
    return MISSING;
}

static int await_round(struct group *g, int64_t number, int64_t sleep_ns) {
    if (complete(g, number)) return THERE;
    int64_t began = now_ns(), least = g->yields ? LEAST_YIELD_NS : LEAST_SPIN_NS;
    int64_t most = g->yields ? MOST_YIELD_NS : MOST_SPIN_NS;
    int found = MISSING, spins = !g->yields || g->spin_ns > least;
    if (spins) found = spin_for_round(g, number, began + g->spin_ns);
    if (found == THERE && !g->yields) return THERE;
    int slept = found == MISSING;
    if (slept) found = sleep_for_round(g, number, sleep_ns);
    int soon = found == THERE && now_ns() - began < SOON_NS;
    int64_t next = !soon ? g->spin_ns / 2 : slept ? 2 * g->spin_ns : g->spin_ns;
    g->spin_ns = next < least ? least : next > most ? most : next;
    return found;
}

/* Come to round number; THERE if all others have. */
API int instep_post_round(const struct group *g, int64_t number) {
    post_round(g, number);
    return complete(g, number) ? THERE : MISSING;
}

/* Come to round number and wait for all others, asleep for one slice at most: THERE, or MISSING. */
API int instep_await_round(struct group *g, int64_t number, int64_t sleep_ns) {
    post_round(g, number);
    return await_round(g, number, sleep_ns);
}

/* ---- arithmetic ----------------------------------------------------------------------------------------- */

#define KERNELS(real, name)                                                                                  \
    CLONES void instep_add_##name(real *restrict to, const real *a, const real *b, int64_t n) {             \
        for (int64_t i = 0; i < n; i++) to[i] = a[i] + b[i];                                                \
    }                                                                                                       \
    CLONES void instep_add_to_##name(real *restrict to, const real *restrict b, int64_t n) {                \
        for (int64_t i = 0; i < n; i++) to[i] = to[i] + b[i];                                               \
    }                                                                                                       \
    CLONES void instep_multiply_##name(real *restrict to, const real *a, const real *b, int64_t n) {        \
        for (int64_t i = 0; i < n; i++) to[i] = a[i] * b[i];                                                \
    }                                                                                                       \
    CLONES void instep_multiply_to_##name(real *restrict to, const real *restrict b, int64_t n) {           \
        for (int64_t i = 0; i < n; i++) to[i] = to[i] * b[i];                                               \
    }                                                                                                       \
    CLONES void instep_times_to_##name(real *to, real factor, int64_t n) {                                  \
        for (int64_t i = 0; i < n; i++) to[i] = to[i] * factor;                                             \
    }                                                                                                       \
    CLONES void instep_divide_##name(real *to, real divisor, int64_t n) {                                   \
        for (int64_t i = 0; i < n; i++) to[i] = to[i] / divisor;                                            \
    }

KERNELS(float, f32)
KERNELS(double, f64)

/* to = a o b; to is neither. */
static void combine(int64_t type, int64_t how, void *to, const void *a, const void *b, int64_t n) {
    if (type == FLOAT32 && how == ADD) instep_add_f32(to, a, b, n);
    else if (type == FLOAT32) instep_multiply_f32(to, a, b, n);
    else if (how == ADD) instep_add_f64(to, a, b, n);
    else instep_multiply_f64(to, a, b, n);
}

/* to = to o b */
static void combine_to(int64_t type, int64_t how, void *to, const void *b, int64_t n) {
    if (type == FLOAT32 && how == ADD) instep_add_to_f32(to, b, n);
    else if (type == FLOAT32) instep_multiply_to_f32(to, b, n);
    else if (how == ADD) instep_add_to_f64(to, b, n);
    else instep_multiply_to_f64(to, b, n);
}

static void finish(int64_t type, int64_t how, double number, void *to, int64_t n) {
    if (how == TIMES && type == FLOAT32) instep_times_to_f32(to, (float)number, n);
    else if (how == TIMES) instep_times_to_f64(to, number, n);
    else if (how == DIVIDED && type == FLOAT32) instep_divide_f32(to, (float)number, n);
    else if (how == DIVIDED) instep_divide_f64(to, number, n);
}

/* values of length elements each, combined pair by pair: value left becomes left o right, in this order. What
 * value root is then, finished, goes to all homes. A home may be one of the values, whose memory is changed in
 * no other way. */
struct sum {
    int64_t type, how, finish;
    double number;
    int64_t length;
    int64_t num_values;
    const void *const *values;
    int64_t num_pairs;
    const int32_t (*pairs)[2];
    int64_t root;
    int64_t num_homes;
    void *const *homes;
};

/* Which small block holds a value, after its first pair; blocks of values that are used up are used again. */
static int64_t place_blocks(const struct sum *s, int32_t *block, int32_t *spare, int32_t *chosen) {
    int64_t num_blocks = 0, num_spare = 0;
    for (int64_t i = 0; i < s->num_values; i++) block[i] = -1;
    for (int64_t k = 0; k < s->num_pairs; k++) {
        int32_t left = s->pairs[k][0], right = s->pairs[k][1];
        if (left < 0 || right < 0 || left >= s->num_values || right >= s->num_values || left == right) return -1;
        if (block[left] < 0) block[left] = num_spare ? spare[--num_spare] : (int32_t)num_blocks++;
        if (block[right] >= 0) spare[num_spare++] = block[right];
        chosen[k] = block[left];
    }
    return num_blocks;
}

static void one_block(const struct sum *s, int64_t start, int64_t n, const void **at, uint8_t *blocks,
                      int64_t block_bytes, const int32_t *chosen) {
    int64_t item = s->type == FLOAT32 ? 4 : 8;
    for (int64_t i = 0; i < s->num_values; i++) at[i] = (const uint8_t *)s->values[i] + start * item;
    for (int64_t k = 0; k < s->num_pairs; k++) {
        int32_t left = s->pairs[k][0], right = s->pairs[k][1];
        uint8_t *to = blocks + chosen[k] * block_bytes;
        if (at[left] == to) combine_to(s->type, s->how, to, at[right], n);
        else combine(s->type, s->how, to, at[left], at[right], n);
        at[left] = to;
    }
    const void *total = at[s->root];
    if (s->finish != NO_SCALE) {
        if (s->num_pairs == 0) {
            memcpy(blocks, total, n * item);
            total = blocks;
        }
        finish(s->type, s->finish, s->number, (void *)total, n);
    }
    for (int64_t h = 0; h < s->num_homes; h++) {
        uint8_t *home = (uint8_t *)s->homes[h] + start * item;
        if (home != total) memcpy(home, total, n * item);
    }
}

/* One pass over memory. 0, or FAILED: there is no room for the notes, or the sum makes no sense. */
API int instep_add_up(const struct sum *s) {
    int64_t most = s->num_values + s->num_pairs + 1, item = s->type == FLOAT32 ? 4 : 8;
    if (s->num_values < 1 || s->root < 0 || s->root >= s->num_values) return FAILED;
    int32_t *notes = malloc((size_t)(3 * most) * sizeof *notes);
    const void **at = malloc((size_t)s->num_values * sizeof *at);
    uint8_t *blocks = NULL;
    int64_t num_blocks = notes && at ? place_blocks(s, notes, notes + most, notes + 2 * most) : -1;
    if (num_blocks >= 0) {
        int64_t room = num_blocks ? num_blocks : 1, bytes = BLOCKS_BYTES / room / LINE * LINE;
        bytes = bytes > BLOCK_BYTES ? BLOCK_BYTES : bytes < LEAST_BLOCK_BYTES ? LEAST_BLOCK_BYTES : bytes;
        if (posix_memalign((void **)&blocks, LINE, (size_t)(room * bytes)) != 0) blocks = NULL;
        for (int64_t start = 0, n = bytes / item; blocks && start < s->length; start += n)
            one_block(s, start, s->length - start < n ? s->length - start : n, at, blocks, bytes,
                      notes + 2 * most);
    }
    free(notes);
    free(at);
    int failed = blocks == NULL;
    free(blocks);
    return failed ? FAILED : 0;
}

/* ---- all-reduce of ordinary memory ---------------------------------------------------------------------- */

/* to = values[0] o values[1] o ..., finished, in homes as well; block by block, so partial sums stay in the
 * first-level cache. to may be one of the values, and NULL; values may be homes. */
static void fold(int64_t type, int64_t how, int64_t last, double number, const uint8_t *const *values,
                 int64_t count, uint8_t *const *homes, int64_t num_homes, int64_t nbytes) {
    _Alignas(LINE) uint8_t block[BLOCK_BYTES];
    int64_t item = type == FLOAT32 ? 4 : 8;
    for (int64_t start = 0; start < nbytes; start += BLOCK_BYTES) {
        int64_t bytes = nbytes - start < BLOCK_BYTES ? nbytes - start : BLOCK_BYTES, n = bytes / item;
        combine(type, how, block, values[0] + start, values[1] + start, n);
        for (int64_t i = 2; i < count; i++) combine_to(type, how, block, values[i] + start, n);
        finish(type, last, number, block, n);
        for (int64_t h = 0; h < num_homes; h++) memcpy(homes[h] + start, block, bytes);
    }
}

/* An all-reduce under way. Piece k of x goes through slot k % 4, of which there are two in each half; the ranks
 * tell each other what they are about to do in words beside their posts, as in every first round.
 *
 * At once: a rank copies its piece in, posts, and adds what all have copied. It copies piece k + 1 before it
 * waits for piece k, so that a rank that is a little late holds up none.
 * By slices: it copies its piece in without its own slice of it, adds that slice of all ranks, and takes the
 * other slices from those who added them; in one round are the numbers of piece k and the sums of piece k - 1.
 *
 * A slot is written to again four pieces later. By then all have posted a round to which they came after they
 * had read it. After the last piece the last two slots may still be read, so they have to lie in the half that
 * the next operation does not begin with: there is one piece, or an even number, and a round may be left out. */
struct reduction {
    struct group *group;
    int64_t type, how, finish;
    double number;
    int64_t root; /* -1: the result is for all */
    uint8_t *x;
    int64_t nbytes;
    int64_t by_slices, slot_bytes;
    int64_t compare; /* whether the first round is that of the call, at: */
    int64_t calls, call_stride, call_bytes, location_bytes;
    int64_t rounds; /* so far; in the end with those of this operation */
    /* Progress, 0 at the beginning; pieces < 0: over. */
    int64_t pieces, piece_bytes, slice_bytes, at, stage;
};

enum { BEGIN = 0, WAITING = 1, OVER = 2 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static uint8_t *slot(const struct reduction *r, int64_t rank, int64_t piece) {
    const struct group *g = r->group;
    int64_t half = (r->rounds + 1 + (piece % 4) / 2) & 1;
    return g->halves + (2 * rank + half) * g->half_bytes + (piece % 2) * r->slot_bytes;
}

/* Bytes of slice (of a piece, by slices) or of all of a piece. */
static int64_t span(const struct reduction *r, int64_t piece, int64_t slice, uint8_t **from) {
    int64_t end = least((piece + 1) * r->piece_bytes, r->nbytes), start = piece * r->piece_bytes;
    if (r->by_slices) {
        start += slice * r->slice_bytes;
        end = least(start + r->slice_bytes, end);
    }
    *from = r->x + start;
    return end > start ? end - start : 0;
}

static void copy_in(const struct reduction *r, int64_t piece) {
    uint8_t *from, *to = slot(r, r->group->rank, piece);
    for (int64_t slice = 0; slice < (r->by_slices ? r->group->size : 1); slice++) {
        if (r->by_slices && slice == r->group->rank) continue;
        int64_t bytes = span(r, piece, slice, &from);
        if (bytes) memcpy(to + slice * r->slice_bytes, from, bytes);
    }
}

static void sum_piece(const struct reduction *r, int64_t piece) {
    const struct group *g = r->group;
    const uint8_t *values[MOST_RANKS];
    uint8_t *own, *homes[2];
    int64_t bytes = span(r, piece, g->rank, &own), num_homes = 0;
    int wanted = r->root < 0 || r->root == g->rank;
    if (bytes == 0 || (!wanted && !r->by_slices)) return;
    for (int64_t rank = 0; rank < g->size; rank++)
        values[rank] = rank == g->rank ? own : slot(r, rank, piece) + (r->by_slices ? g->rank * r->slice_bytes : 0);
    if (r->by_slices) homes[num_homes++] = slot(r, g->rank, piece) + g->size * r->slice_bytes;
    if (wanted) homes[num_homes++] = own;
    if (g->size > 1) fold(r->type, r->how, r->finish, r->number, values, g->size, homes, num_homes, bytes);
}

static void copy_out(const struct reduction *r, int64_t piece) {
    const struct group *g = r->group;
    uint8_t *to;
    if (r->root >= 0 && r->root != g->rank) return;
    for (int64_t i = 1; i < g->size; i++) {
        int64_t rank = (g->rank + i) % g->size, bytes = span(r, piece, rank, &to);
        if (bytes) memcpy(to, slot(r, rank, piece) + g->size * r->slice_bytes, bytes);
    }
}

static int agreed(const struct reduction *r) {
    const struct group *g = r->group;
    const uint8_t *first = g->blocks + r->calls + ((r->rounds + 1) & 1) * r->call_stride;
    int differ = 0, shared = 0;
    for (int64_t rank = 0; rank < g->size; rank++) {
        const uint8_t *mine = first + g->rank * g->block_bytes, *theirs = first + rank * g->block_bytes;
        differ |= memcmp(mine, theirs, r->call_bytes) != 0;
        shared |= memcmp(mine + r->call_bytes, theirs + r->call_bytes, r->location_bytes) != 0;
    }
    return differ ? DIFFERENT : shared ? SHARED : THERE;
}

static void plan_pieces(struct reduction *r) {
    int64_t most = r->slot_bytes / LINE * LINE, alone = most; /* what one piece may have, and if it is the only one */
    if (r->by_slices) {
        most = r->slot_bytes / (r->group->size + 1) / LINE * LINE * r->group->size;
        alone = r->group->half_bytes / (r->group->size + 1) / LINE * LINE * r->group->size;
    }
    r->pieces = r->nbytes > alone ? (r->nbytes + 2 * most - 1) / (2 * most) * 2 : 1;
    int64_t whole = (r->nbytes + r->pieces - 1) / r->pieces, unit = r->by_slices ? LINE * r->group->size : LINE;
    r->piece_bytes = (whole + unit - 1) / unit * unit;
    if (r->by_slices) r->slice_bytes = r->piece_bytes / r->group->size;
}

/* Go on with it as far as the others have come: THERE when it is over; MISSING: call again when all have come
 * to round rounds + at + 1; DIFFERENT or SHARED: nothing was done but the first round. */
API int instep_all_reduce(struct reduction *r, int64_t sleep_ns) {
    struct group *g = r->group;
    int found;
    if (r->stage == BEGIN) {
        if (g->size > MOST_RANKS) return FAILED;
        plan_pieces(r);
        copy_in(r, 0);
        post_round(g, r->rounds + 1);
        if (!r->by_slices && r->pieces > 1) copy_in(r, 1);
        r->stage = WAITING;
    }
    int64_t num_rounds = r->by_slices ? r->pieces + 1 : r->pieces;
    for (; r->at < num_rounds; r->at++) {
        if (await_round(g, r->rounds + r->at + 1, sleep_ns) == MISSING) return MISSING;
        if (r->at == 0 && r->compare && (found = agreed(r)) != THERE) {
            r->rounds += 1;
            return found;
        }
        if (r->by_slices) {
            if (r->at < r->pieces) sum_piece(r, r->at);
            if (r->at + 1 < r->pieces) copy_in(r, r->at + 1);
            if (r->at < r->pieces) post_round(g, r->rounds + r->at + 2);
            if (r->at > 0) copy_out(r, r->at - 1);
        } else {
            if (r->at + 1 < r->pieces) post_round(g, r->rounds + r->at + 2);
            sum_piece(r, r->at);
            if (r->at + 2 < r->pieces) copy_in(r, r->at + 2);
        }
    }
    int64_t last_half = (r->rounds + 1 + ((r->pieces - 1) % 4) / 2) & 1;
    r->rounds += num_rounds;
    if ((r->rounds & 1) != last_half) r->rounds += 1;
    r->stage = OVER;
    return THERE;
}
