/*
 * dlsym(handle, name): asks vram_dlsym_route(handle, name, return address) where to go on, and jumps there with every
 * argument as it came (law 3). A jump, not a call: the return address that the real dlsym sees, which decides what
 * RTLD_NEXT means, is the caller's. No symbol version on purpose (law 5).
 */
#if defined(__x86_64__)

    .text
    .globl  dlsym
    .type   dlsym, @function
    .p2align 4
dlsym:
    .cfi_startproc
    endbr64
    pushq   %rdi
    .cfi_adjust_cfa_offset 8
    pushq   %rsi
    .cfi_adjust_cfa_offset 8
    subq    $8, %rsp /* 16-byte alignment for the call */
    .cfi_adjust_cfa_offset 8
    movq    24(%rsp), %rdx
    call    vram_dlsym_route
    addq    $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq    %rsi
    .cfi_adjust_cfa_offset -8
    popq    %rdi
    .cfi_adjust_cfa_offset -8
    jmp     *%rax
    .cfi_endproc
    .size   dlsym, .-dlsym

#elif defined(__aarch64__)

    .text
    .globl  dlsym
    .type   dlsym, %function
    .p2align 2
dlsym:
    .cfi_startproc
    hint    #34 /* bti c */
    stp     x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_offset 29, -32
    .cfi_offset 30, -24
    mov     x29, sp
    stp     x0, x1, [sp, #16]
    mov     x2, x30
    bl      vram_dlsym_route
    mov     x16, x0
    ldp     x0, x1, [sp, #16]
    ldp     x29, x30, [sp], #32
    .cfi_restore 29
    .cfi_restore 30
    .cfi_adjust_cfa_offset -32
    br      x16
    .cfi_endproc
    .size   dlsym, .-dlsym

#else
#error "vramshim: dlsym needs a trampoline for this processor"
#endif

    .section .note.GNU-stack, "", %progbits
