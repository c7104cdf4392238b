/* Ranks as threads that meet, and reduce drawn messages in drawn ways: stress RANKS OPERATIONS SEED.
 *
 * Compiled with a sanitizer, it finds what two ranks touch at the same time. Every sum is compared.
 */

#include "core.c"

#include <pthread.h>
#include <stdio.h>

enum { PAGE = 4096, HALF_BYTES = 8192, MOST_ELEMENTS = 9000, SLICE_NS = 2000000 };

static int64_t num_ranks, num_operations;
static uint32_t seed;
static uint8_t *memory;

static uint32_t draw(uint32_t *state) { return *state = *state * 1664525u + 1013904223u, *state >> 8; }

static void wait_for(struct group *g, int64_t number) {
    if (instep_await_round(g, number, SLICE_NS) == THERE) return;
    while (instep_await_round(g, number, SLICE_NS) != THERE) {}
}

static float number_of(int64_t operation, int64_t rank, int64_t i) {
    return (float)((operation * 7 + rank * 13 + i * (rank + 1)) % 101);
}

/* In the order of the ranks, as the core has to. */
static float expected(int64_t operation, int64_t i, int64_t how, int64_t last) {
    float total = number_of(operation, 0, i);
    for (int64_t rank = 1; rank < num_ranks; rank++) {
        float next = number_of(operation, rank, i);
        total = how == ADD ? total + next : total * next;
    }
    return last == DIVIDED ? total / (float)num_ranks : total;
}

static void reduce(struct group *g, int64_t *rounds, float *x, int64_t operation, uint32_t *drawn) {
    int64_t length = draw(drawn) % MOST_ELEMENTS, how = draw(drawn) % 2, by_slices = draw(drawn) % 2;
    int64_t last = draw(drawn) % 2 ? DIVIDED : NO_SCALE, slot_bytes = 1024 << draw(drawn) % 3;
    int64_t root = (int64_t)(draw(drawn) % (uint32_t)(num_ranks + 1)) - 1;
    for (int64_t i = 0; i < length; i++) x[i] = number_of(operation, g->rank, i);
    struct reduction r = {
        .group = g, .type = FLOAT32, .how = how, .finish = last, .number = (double)num_ranks, .root = root,
        .x = (uint8_t *)x, .nbytes = length * 4, .by_slices = by_slices, .slot_bytes = slot_bytes,
        .rounds = *rounds};
    while (instep_all_reduce(&r, SLICE_NS) == MISSING) {}
    *rounds = r.rounds;
    for (int64_t i = 0; i < length; i++) {
        float wanted = root < 0 || root == g->rank ? expected(operation, i, how, last) : number_of(operation, g->rank, i);
        if (memcmp(&x[i], &wanted, sizeof wanted) != 0) {
            fprintf(stderr, "operation %ld, rank %ld, element %ld: %g, not %g\n", (long)operation,
                    (long)g->rank, (long)i, x[i], wanted);
            abort();
        }
    }
}

static void *live(void *argument) {
    int64_t rank = (int64_t)(intptr_t)argument, rounds = 0;
    struct group g = {
        .size = num_ranks, .rank = rank, .blocks = memory + PAGE, .block_bytes = PAGE,
        .done = (int64_t *)(memory + 64), .sleepers = (int64_t *)(memory + 128),
        .halves = memory + (1 + num_ranks) * PAGE, .half_bytes = HALF_BYTES, .spin_ns = 1000,
        .yields = num_ranks > 2};
    float *x = malloc(MOST_ELEMENTS * sizeof *x);
    uint32_t shared = seed, own = seed + 1 + (uint32_t)rank;
    for (int64_t operation = 0; operation < num_operations; operation++) {
        uint32_t kind = draw(&shared) % 3;
        for (volatile uint32_t late = draw(&own) % 3000; late > 0; late--) {}
        if (kind == 0) wait_for(&g, ++rounds);
        else reduce(&g, &rounds, x, operation, &shared);
    }
    free(x);
    return NULL;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    num_ranks = atoll(words[1]), num_operations = atoll(words[2]), seed = (uint32_t)atoll(words[3]);
    size_t nbytes = (size_t)((1 + num_ranks) * PAGE + num_ranks * 2 * HALF_BYTES);
    memory = aligned_alloc(PAGE, (nbytes + PAGE - 1) / PAGE * PAGE);
    memset(memory, 0, nbytes);
    pthread_t threads[MOST_RANKS];
    for (int64_t rank = 0; rank < num_ranks; rank++)
        pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int64_t rank = 0; rank < num_ranks; rank++) pthread_join(threads[rank], NULL);
    free(memory);
    puts("all sums are right");
    return 0;
}
