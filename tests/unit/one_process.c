/*
 * Preloaded under the unit tests: runs each in a fork of this process. Criterion executes the program anew for each test,
 * with all the libraries that it brings along, which under valgrind takes longer than the tests; and it does not see the
 * status by which valgrind tells of an error.
 */
#include <criterion/criterion.h>
#include <criterion/internal/ordered-set.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <valgrind/valgrind.h>

static const struct criterion_test *current;

/* What a test calls of Criterion. */
void criterion_internal_test_setup(void)
{
    if (current->data->init)
        current->data->init();
}

void criterion_internal_test_main(void (*test)(void))
{
    test();
}

void criterion_internal_test_teardown(void)
{
    if (current->data->fini)
        current->data->fini();
}

void criterion_send_assert(struct criterion_assert_stats *stats)
{
    if (!stats->passed)
        fprintf(stderr, "%s:%u: %s\n", stats->file, stats->line, stats->message ? stats->message : "failed");
}

void criterion_abort_test(void)
{
    exit(EXIT_FAILURE);
}

static bool passes(const struct criterion_test *test)
{
    int status;
    current = test;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        test->test();
        exit(EXIT_SUCCESS);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return false;
    return WIFSIGNALED(status) ? WTERMSIG(status) == test->data->signal
                               : !test->data->signal && WEXITSTATUS(status) == test->data->exit_code;
}

int main(void)
{
    unsigned passed = 0, failed = 0;
    struct criterion_test_set *set = criterion_initialize();
    VALGRIND_ENABLE_ERROR_REPORTING; /* which it disables */
    FOREACH_SET(struct criterion_suite_set *suite, set->suites)
        FOREACH_SET(struct criterion_test *test, suite->tests) {
            if (passes(test)) {
                passed++;
            } else {
                failed++;
                printf("FAIL %s::%s\n", test->category, test->name);
            }
        }
    printf("%u passed, %u failed\n", passed, failed);
    return failed || !passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
