// plan_fuzz.cpp: engines under plans and calls that no honest caller would make.
//
// The input chooses an engine and a row of calls. A shadow of the engine makes valid plans, and
// most of them are then damaged in one place. Between the steps sequences are forked, saved and
// loaded, preempted, turned off from their drafter and turned on, and started again with what is
// kept of them, alone or in the plan of a step; drafts are given, steps run in a row. Whatever
// comes: no crash, a refused call changes nothing, nothing is gone on from under another tag, what
// a step reports agrees with what the engine says afterwards, and each token that a step chose has
// the probability that the target alone gives it after the tokens before it; a greedy one is the
// best.
#include "plan/driver.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < 2) {
        return 0;
    }
    choices input(data, size);
    plan_fuzz::driver(plan_fuzz::engine_of(input.below(plan_fuzz::N_ENGINES)), input).run();
    return 0;
}
