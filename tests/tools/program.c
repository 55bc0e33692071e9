/* Says that it ran. Linked statically, it is what the loader can preload nothing into. */
#include <stdio.h>

int main(void) { return puts("ran") < 0; }
