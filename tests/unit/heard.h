/* What the shim says on descriptor 2, heard through a pipe. */
#ifndef VRAM_TESTS_HEARD_H
#define VRAM_TESTS_HEARD_H

void listen_to_it(void);       /* from now on */
const char *heard(void);       /* all that it has said */
void hear(const char *text);   /* waits until that has been said; fails the test after some seconds */
unsigned times_heard(const char *text);

#endif
