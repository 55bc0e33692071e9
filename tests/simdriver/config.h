/* The SIMCUDA_* environment, read once before the first call (state.c). README.md has the table. */
#ifndef SIMDRIVER_CONFIG_H
#define SIMDRIVER_CONFIG_H

void sim_config_read(void);

#endif
